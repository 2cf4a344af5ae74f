// Attention: the output and the log-sum-exp, a block of query rows at a time.
#ifndef EJKERNEL_FLASH_FORWARD_H_
#define EJKERNEL_FLASH_FORWARD_H_

#include "problem.h"

namespace ejkernel {

// A row's weights are powers of two of its scores less a reference score, by rights the largest so
// far. It is kept as long as no score is further above it than this: then nothing has to be scaled
// anew, and the scores turn into weights while they are still in registers.
constexpr float FAR_ABOVE = 24;

class Forward {
  typedef Tile<480> Scores;
  static constexpr long MOST_STRIPS = 64;

 public:
  Forward(const Problem& problem, long block_q, long block_k)
      : p(problem),
        block_q_(round_up(least(least(block_q, MOST_STRIPS * ROWS), p.rows()), ROWS)),
        block_k_(round_up(least(least(block_k, Scores::MOST_KEYS), p.k_len), COLUMNS)) {}

  Array out, lse;  // the latter without data if nobody wants it

  // --- memory, in numbers: for every head its keys, its values and its queries ---
  long packed_keys() const { return p.padded_keys * p.dim; }
  long packed_values() const { return p.padded_keys * p.padded_value_dim; }
  long packed_head() const {
    return packed_keys() + packed_values() + Scratch::padded(round_up(p.rows(), ROWS) * p.dim);
  }
  long packed_size() const { return p.batch * p.kv_heads * packed_head(); }
  long scratch_size() const {
    return Scratch::padded(block_q_ * p.padded_value_dim) + ROWS * Scores::STRIDE +
           Scratch::padded(COLUMNS * most(p.dim, p.padded_value_dim));
  }

  // --- first everything is packed, then rows are worked on ---
  long packing_items() const { return p.batch * (key_parts() + row_parts()); }
  long row_items() const { return p.batch * p.kv_heads * row_blocks(); }

  // All heads of some keys or queries: they lie beside each other.
  void pack(float* packed, float* scratch, long item) const {
    const long b = item / (key_parts() + row_parts()), part = item % (key_parts() + row_parts());
    if (part < key_parts()) {
      const long end = least(p.padded_keys, (part + 1) * KEYS_PER_ITEM);
      for (long key = part * KEYS_PER_ITEM; key < end; key += COLUMNS)
        for (long h = 0; h < p.kv_heads; h++) pack_keys(head(packed, b, h), scratch, b, h, key);
      return;
    }
    const long first = (part - key_parts()) * ROWS_PER_ITEM;
    for (long row = first; row < least(p.rows(), first + ROWS_PER_ITEM); row += ROWS)
      for (long h = 0; h < p.kv_heads; h++)
        pack_strips(queries(head(packed, b, h)) + row * p.dim, p.query_rows(p.q, b, h, p.dim), row,
                    least(p.rows(), row + ROWS), scratch, p.scale * p.unit);
  }

  void attend(float* packed, float* scratch, long item) const {
    const long b = item / row_blocks() / p.kv_heads, h = item / row_blocks() % p.kv_heads;
    // The last rows see the most keys: they come first, so that none is left over at the end.
    const long first = (row_blocks() - 1 - item % row_blocks()) * block_q_;
    const long last = least(first + block_q_, p.rows());
    const float* keys = head(packed, b, h);
    const float* values = keys + packed_keys();
    const float* strips = queries(keys) + first * p.dim;
    float* sums = scratch;
    float* tile = sums + Scratch::padded(block_q_ * p.padded_value_dim);

    const long count = ceil_div(last - first, ROWS);
    Strip found[MOST_STRIPS];
    StripMask masks[MOST_STRIPS];
    StripBias biases[MOST_STRIPS];
    memset(sums, 0, count * ROWS * p.padded_value_dim * sizeof(float));
    long begin = p.k_len, end = 0;
    for (long s = 0; s < count; s++) {
      masks[s] = StripMask(p, b, h, first + s * ROWS);
      biases[s] = StripBias(p, b, h, first + s * ROWS);
      begin = least(begin, masks[s].begin), end = most(end, masks[s].end);
    }
    for (long key = begin / COLUMNS * COLUMNS; key < end; key += block_k_)
      for (long s = 0; s < count; s++) {
        const StripMask& mask = masks[s];
        long from = most(key, mask.begin / COLUMNS * COLUMNS);
        long until = least(key + block_k_, round_up(mask.end, COLUMNS));
        while (from < until && !mask.sees(from)) from += COLUMNS;
        while (from < until && !mask.sees(until - COLUMNS)) until -= COLUMNS;
        while (from < until) {
          const long end = found[s].settled ? until : least(until, from + FIRST_KEYS);
          add_keys(found[s], strips + s * ROWS * p.dim, sums + s * ROWS * p.padded_value_dim, keys,
                   values, from, end, mask, biases[s], tile);
          from = end;
        }
      }
    for (long row = first; row < last; row++)
      finish(found[(row - first) / ROWS], (row - first) % ROWS,
             sums + (row - first) * p.padded_value_dim, b, h, row);
  }

  long block_q() const { return block_q_; }

 private:
  static constexpr long KEYS_PER_ITEM = COLUMNS * 4;
  static constexpr long ROWS_PER_ITEM = ROWS * 12;
  // A first look at so many keys gives the references.
  static constexpr long FIRST_KEYS = COLUMNS * ceil_div(32, COLUMNS);

  // What the rows of a strip remember of the keys they met: relative to `reference`, the sum of
  // the weights, still spread over the lanes.
  struct Strip {
    float reference[ROWS];
    vec total[ROWS];
    bool settled = false;  // every row has met a key
    Strip() {
      for (int r = 0; r < ROWS; r++) reference[r] = -INFINITE, total[r] = vec{};
    }
  };

  long key_parts() const { return ceil_div(p.padded_keys, KEYS_PER_ITEM); }
  long row_parts() const { return ceil_div(p.rows(), ROWS_PER_ITEM); }
  float* head(float* packed, long b, long h) const {
    return packed + (b * p.kv_heads + h) * packed_head();
  }
  template <typename Float>
  Float* queries(Float* head) const {
    return head + packed_keys() + packed_values();
  }

  // The panel of keys from `key` on, and their values.
  void pack_keys(float* keys, float* scratch, long b, long h, long key) const {
    const long end = least(p.k_len, key + COLUMNS);
    float* values = keys + packed_keys();
    Rows v = p.key_rows(p.v, b, h, p.value_dim, p.v_paging);
    const Rows k = p.key_rows(p.k, b, h, p.dim, p.k_paging);
    pack_transposed(keys + key * p.dim, k, key, end, scratch);
    if (p.may_hide()) {
      // Zero times NaN would be NaN in rows that do not see the key. Those that do see it get NaN
      // through its score.
      for (long c = 0; c < end - key; c++) {
        v.read(scratch, key + c);
        if (!is_finite_row(scratch, p.value_dim)) keys[key * p.dim + c] = __builtin_nanf("");
      }
      v.clean = true;
    }
    pack_panels(values + key * COLUMNS, p.padded_keys * COLUMNS, v, key, end, scratch);
    for (long c = end; c < key + COLUMNS; c++)
      for (long d = 0; d < p.padded_value_dim; d += COLUMNS)
        memset(values + d * p.padded_keys + c * COLUMNS, 0, COLUMNS * sizeof(float));
  }

  long row_blocks() const { return ceil_div(p.rows(), block_q_); }

  // Scores less the references, to base 2.
  EJ_INLINE void score(Sums& scores, const float* strip, const float* keys, long key,
                       const StripMask& mask, const StripBias& bias,
                       const float* references) const {
    const bool plain = p.soft_cap == 0 && !bias.given;
    begin_below(scores, plain ? references : NOTHING);
    multiply_strip(scores, strip, keys + key * p.dim, p.dim);
    if (__builtin_expect(!plain, 0)) {
      if (p.soft_cap != 0) cap(scores);
      if (bias.given) bias.add(scores, key);
      subtract(scores, references, p.to_log2);
    }
    if (__builtin_expect(mask.hides_some_of(key), 0)) mask.hide(scores, key);
  }

  // Scores as they are, in their own unit.
  EJ_INLINE void score(Sums& scores, const float* strip, const float* keys, long key,
                       const StripMask& mask, const StripBias& bias) const {
    clear(scores);
    multiply_strip(scores, strip, keys + key * p.dim, p.dim);
    if (p.soft_cap != 0) cap(scores);
    if (bias.given) bias.add(scores, key);
    if (mask.hides_some_of(key)) mask.hide(scores, key);
  }

  __attribute__((noinline)) void cap(Sums& scores) const {
    for (int r = 0; r < ROWS; r++)
      for (int j = 0; j < VECTORS; j++)
        scores[r][j] =
            tanh(scores[r][j] * (1 / (p.unit * p.soft_cap))) * (p.soft_cap * p.unit);
  }

  void add_keys(Strip& strip, const float* queries, float* sums, const float* keys,
                const float* values, long from, long until, const StripMask& mask,
                const StripBias& bias, float* tile) const {
    float shrink[ROWS];
    const bool same = strip.settled && weigh(strip, queries, keys, from, until, mask, bias, tile);
    if (!same) weigh_anew(strip, queries, keys, from, until, mask, bias, tile, shrink);
    for (long d = 0; d < p.padded_value_dim; d += COLUMNS) {
      Sums found;
      load_sums(found, sums + d, p.padded_value_dim);
      if (!same)
        EJ_UNROLL for (int r = 0; r < ROWS; r++)
          EJ_UNROLL for (int j = 0; j < VECTORS; j++) found[r][j] *= shrink[r];
      Scores::multiply_rows(found, tile, values + d * p.padded_keys + from * COLUMNS, until - from);
      store_sums(found, sums + d, p.padded_value_dim);
    }
  }

  // The tile's weights relative to the references; false, and nothing is changed, if one is too large.
  bool weigh(Strip& strip, const float* queries, const float* keys, long from, long until,
             const StripMask& mask, const StripBias& bias, float* tile) const {
    vec total[ROWS];
    EJ_UNROLL for (int r = 0; r < ROWS; r++) total[r] = strip.total[r];
    vec top = vec{};
    for (long key = from; key < until; key += COLUMNS) {
      Sums scores;
      score(scores, queries, keys, key, mask, bias, strip.reference);
      EJ_UNROLL for (int r = 0; r < ROWS; r += TOGETHER) {
        vec weights[TOGETHER * VECTORS];
        EJ_UNROLL for (int i = 0; i < TOGETHER * VECTORS; i++) {
          weights[i] = scores[r + i / VECTORS][i % VECTORS];
          top = larger(weights[i], top);
        }
        exp2(weights);
        EJ_UNROLL for (int i = 0; i < TOGETHER * VECTORS; i++) {
          total[r + i / VECTORS] += weights[i];
          store(tile + (r + i / VECTORS) * Scores::STRIDE + key - from + i % VECTORS * LANES,
                weights[i]);
        }
      }
    }
    if (largest(top) > FAR_ABOVE) return false;
    EJ_UNROLL for (int r = 0; r < ROWS; r++) strip.total[r] = total[r];
    return true;
  }

  // The same relative to new references; `shrink` is what earlier sums have to be multiplied by.
  __attribute__((noinline)) void weigh_anew(Strip& strip, const float* queries, const float* keys,
                                            long from, long until, const StripMask& mask,
                                            const StripBias& bias, float* tile,
                                            float* shrink) const {
    vec top[ROWS];
    for (int r = 0; r < ROWS; r++) top[r] = all(-INFINITE);
    for (long key = from; key < until; key += COLUMNS) {
      Sums scores;
      score(scores, queries, keys, key, mask, bias);
      for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < VECTORS; j++) top[r] = larger(scores[r][j], top[r]);
      store_sums(scores, tile + key - from, Scores::STRIDE);
    }
    strip.settled = true;
    for (int r = 0; r < ROWS; r++) {
      const float before = strip.reference[r], block = largest(top[r]);
      const float reference = block > before ? block : before;
      const float shift = reference == -INFINITE ? 0 : reference;
      strip.settled = strip.settled && reference != -INFINITE;
      strip.reference[r] = reference;
      shrink[r] = exp2(all((before - shift) * p.to_log2))[0];
      vec total = strip.total[r] * shrink[r];
      float* row = tile + r * Scores::STRIDE;
      for (long c = 0; c < until - from; c += LANES) {
        vec weight = exp2((load(row + c) - shift) * p.to_log2);
        store(row + c, weight);
        total += weight;
      }
      strip.total[r] = total;
    }
  }

  void finish(const Strip& strip, long r, const float* sums, long b, long h, long row) const {
    float total = sum(strip.total[r]), reference = strip.reference[r];
    float shrink = 1;
    if (p.sinks && reference != -INFINITE) {
      // One more key, which has no value.
      const float sink = p.sink(b, h * p.group + row % p.group);
      const float shift = sink > reference ? sink : reference;
      shrink = __builtin_exp2f((reference - shift) * p.to_log2);
      total = total * shrink + __builtin_exp2f((sink - shift) * p.to_log2);
      reference = shift;
    }
    const Rows rows = p.query_rows(out, b, h, p.value_dim);
    rows.fetch(row + 8);
    write_row(out.data, out.type, rows.at(row), p.value_dim, sums, total == 0 ? 0 : shrink / total);
    if (lse.data) static_cast<float*>(lse.data)[p.lse_at(b, h, row)] =
        total == 0 ? -INFINITE : (p.unit == 1 ? reference : reference * LN_2) + __builtin_logf(total);
  }

  const Problem& p;
  long block_q_, block_k_;
};

}  // namespace ejkernel

#endif
