// The gradients of q, k and v, a block of keys against all the rows that see it.
//
// A *part* is a run of keys of one head. It belongs to one thread, which alone writes the gradients
// of these keys and values; what it adds to the gradients of the queries it keeps to itself. If a
// head has several parts, those are added up at the end, always in the same order.
#ifndef EJKERNEL_FLASH_BACKWARD_H_
#define EJKERNEL_FLASH_BACKWARD_H_

#include "problem.h"

namespace ejkernel {

// Blocks of keys are cut into strips in one product and into panels in another.
constexpr long common(long a, long b) { return b == 0 ? a : common(b, a % b); }
constexpr long BOTH = ROWS * COLUMNS / common(ROWS, COLUMNS);

class Backward {
  typedef Tile<192> Scores;
  static constexpr long MOST_ROWS = 384;
  static constexpr float LARGE = 64;  // of a log-sum-exp: below it a probability has all its digits

 public:
  Backward(const Problem& problem, long block_q, long block_k, long workers)
      : p(problem),
        block_q_(round_up(least(least(block_q, MOST_ROWS), p.rows()), ROWS)),
        block_k_(round_up(least(least(block_k, Scores::MOST_KEYS), p.k_len), BOTH)) {
    // Several parts for each thread, so that all of them are done at about the same time; but not
    // smaller than they have to be, for each part packs the queries anew.
    const long blocks = ceil_div(p.k_len, block_k_);
    parts_ = workers == 1 ? 1 : least(blocks, ceil_div(4 * workers, p.batch * p.kv_heads));
    blocks_per_part_ = ceil_div(blocks, parts_);
    parts_ = ceil_div(blocks, blocks_per_part_);
  }

  Array out, dout, dq, dk, dv;
  const float *lse, *dlse;

  // --- what the softmax of each row comes to ---
  // The weight of a score is 2^(score - shift) * share; the share is left to `dout` and `delta`, of
  // which all gradients are multiples.
  //
  // In float32 a large log-sum-exp says little about a probability. Where there is one, all these
  // are found from the scores, as they are rounded here, before the gradients are.
  struct Statistics {
    float *shift = nullptr, *share, *delta;  // for every row of every key head
  } known;
  bool exact = false;  // scores are computed before anything large is subtracted from them

  bool has_large_scores() const {
    const float* end = lse + p.batch * p.heads * p.q_len;
    bool found = false;
    for (const float* x = lse; x < end; x++) found |= __builtin_fabsf(*x) > LARGE && -*x < INFINITE;
    return found;
  }
  long statistics_size() const { return 3 * p.batch * p.kv_heads * padded_rows(); }
  void keep_statistics(float* memory) {
    known.shift = memory;
    known.share = memory + statistics_size() / 3;
    known.delta = memory + statistics_size() / 3 * 2;
    exact = has_large_scores();
  }
  long statistics_items() const { return p.batch * p.kv_heads * ceil_div(p.rows(), block_q_); }

  // Those of a block of rows, before they are known.
  void find_statistics(float* scratch, long item) const {
    const long blocks = ceil_div(p.rows(), block_q_), head = item / blocks;
    const long b = head / p.kv_heads, h = head % p.kv_heads;
    const long first = item % blocks * block_q_;
    const long last = least(first + block_q_, padded_rows());
    Memory m(*this, scratch);
    read_rows(m, b, h, {first, last}, Statistics());
    if (exact) find_from_scores(m, b, h, first, last);
    const long at = head * padded_rows();
    for (long row = first; row < last; row++) {
      known.shift[at + row] = m.shift[row];
      known.share[at + row] = m.share[row];
      known.delta[at + row] = m.delta[row];
    }
  }

  // What a row adds to the gradient of its head's sink.
  void write_sink_gradients(float* to) const {
    for (long b = 0; b < p.batch; b++)
      for (long h = 0; h < p.kv_heads; h++)
        for (long row = 0; row < p.rows(); row++) {
          const long at = (b * p.kv_heads + h) * padded_rows() + row;
          const float sink = p.sink(b, h * p.group + row % p.group);
          const float weight = exp2(all((sink - known.shift[at]) * p.to_log2))[0];
          to[p.lse_at(b, h, row)] = known.share[at] * weight * -known.delta[at];
        }
  }

  long parts() const { return p.batch * p.kv_heads * parts_; }
  bool has_partial_sums() const { return parts_ > 1; }
  long padded_rows() const { return round_up(p.rows(), ROWS); }
  long dq_size() const { return padded_rows() * p.padded_dim; }
  long partial_size() const { return has_partial_sums() ? parts() * dq_size() : 0; }
  long scratch_size() const { return Memory(*this, nullptr).size; }

  void differentiate(float* scratch, float* partial, long item) const {
    const long head = item / parts_, b = head / p.kv_heads, h = head % p.kv_heads;
    const long begin = item % parts_ * blocks_per_part_ * block_k_;
    const long end = least(p.k_len, begin + blocks_per_part_ * block_k_);
    Memory m(*this, scratch);
    if (has_partial_sums()) m.dq = partial + item * dq_size();
    memset(m.dq, 0, dq_size() * sizeof(float));
    const Span rows = rows_that_see(b, begin, end);
    if (rows.begin < rows.end) read_rows(m, b, h, rows, known);
    for (long key = begin; key < end; key += block_k_) add_block(m, b, h, key, end);
    if (!has_partial_sums())
      for (long row = 0; row < p.rows(); row++) write_dq(m.dq + row * p.padded_dim, b, h, row);
  }

  // Adds up what the parts of a head found for one query row after the other.
  long sums() const { return has_partial_sums() ? p.batch * p.kv_heads * ceil_div(p.rows(), 64) : 0; }
  void add_parts(float* partial, long item) const {
    const long blocks = ceil_div(p.rows(), 64), head = item / blocks;
    const long first = item % blocks * 64;
    for (long row = first; row < least(first + 64, p.rows()); row++) {
      float* total = partial + head * parts_ * dq_size() + row * p.padded_dim;
      for (long part = 1; part < parts_; part++)
        for (long d = 0; d < p.padded_dim; d++) total[d] += total[part * dq_size() + d];
      write_dq(total, head / p.kv_heads, head % p.kv_heads, row);
    }
  }

 private:
  struct Span {
    long begin, end;
  };

  // The pieces of a thread's memory.
  struct Memory {
    float *q_strips, *q_panels, *dout_strips, *dout_panels, *shift, *share, *delta, *dq;
    float *k_transposed, *v_transposed, *k_panels, *dk, *dv, *weights, *slopes, *line;
    long size = 0;

    Memory(const Backward& pass, float* from) {
      const Problem& p = pass.p;
      const long rows = pass.padded_rows(), keys = pass.block_k_;
      auto take = [&](float*& piece, long floats) {
        piece = from + size;
        size += Scratch::padded(floats);
      };
      take(q_strips, rows * p.dim);
      take(q_panels, rows * p.padded_dim);
      take(dout_strips, rows * p.value_dim);
      take(dout_panels, rows * p.padded_value_dim);
      take(shift, rows);
      take(share, rows);
      take(delta, rows);
      take(dq, pass.has_partial_sums() ? 0 : pass.dq_size());
      take(k_transposed, keys * p.dim);
      take(v_transposed, keys * p.value_dim);
      take(k_panels, keys * p.padded_dim);
      take(dk, keys * p.padded_dim);
      take(dv, keys * p.padded_value_dim);
      take(weights, pass.block_q_ * Scores::STRIDE);
      take(slopes, pass.block_q_ * Scores::STRIDE);
      take(line, most(COLUMNS, 2) * most(p.padded_dim, p.padded_value_dim));
    }
  };

  // Whole strips of rows that may see keys [begin, end): what rows see moves on with the rows.
  Span rows_that_see(long b, long begin, long end) const {
    long first = 0, last = p.queries_of(b) * p.group;
    if (begin >= p.keys_of(b)) return {0, 0};
    long earliest = 0;
    if (p.causal) earliest = begin;
    if (p.right >= 0) earliest = most(earliest, begin - p.right);
    first = least(last, earliest * p.group);
    if (p.left >= 0) last = least(last, (end + p.left) * p.group);
    return {first / ROWS * ROWS, round_up(last, ROWS)};
  }

  void read_rows(const Memory& m, long b, long h, Span span, const Statistics& known) const {
    const long last = least(span.end, p.rows()), first = span.begin;
    Rows q = p.query_rows(p.q, b, h, p.dim);
    Rows d_out = p.query_rows(dout, b, h, p.value_dim);
    const Rows o = p.query_rows(out, b, h, p.value_dim);
    float* other = m.line + p.padded_value_dim;
    for (long row = first; row < last; row++) {
      if (known.shift) {
        const long at = (b * p.kv_heads + h) * padded_rows() + row;
        m.shift[row] = known.shift[at], m.share[row] = known.share[at];
        m.delta[row] = known.delta[at] * known.share[at];
        continue;
      }
      const long at = p.lse_at(b, h, row);
      m.delta[row] = m.share[row] = 0, m.shift[row] = INFINITE;
      if (lse[at] == -INFINITE) continue;  // it sees nothing: weights are 2^(score - infinity)
      d_out.read(m.line, row), o.read(other, row);
      float delta = 0;
      for (long d = 0; d < p.value_dim; d++) delta += m.line[d] * other[d];
      m.delta[row] = delta - (dlse ? dlse[at] : 0);
      m.shift[row] = lse[at] * p.unit, m.share[row] = 1;
      // Whoever sees something that is not finite gets NaN, and all that it sees gets it from there.
      if (!is_finite_row(m.delta + row, 1) || !is_finite_row(m.shift + row, 1)) {
        m.shift[row] = __builtin_nanf("");
        if (p.may_hide()) m.delta[row] = 0;
      }
    }
    q.clean = d_out.clean = p.may_hide();
    q.factors = d_out.factors = m.share;
    pack_strips(m.dout_strips + first * p.value_dim, d_out, first, last, m.line);
    pack_panels(m.dout_panels + first * COLUMNS, padded_rows() * COLUMNS, d_out, first, last,
                m.line);
    // Queries have no share, but those that see nothing may hold anything.
    for (long row = first; row < last; row++) m.share[row] = m.share[row] != 0;
    pack_strips(m.q_strips + first * p.dim, q, first, last, m.line, p.scale * p.unit);
    pack_panels(m.q_panels + first * COLUMNS, padded_rows() * COLUMNS, q, first, last, m.line,
                p.scale);
    for (long row = last; row < span.end; row++) {  // of a last strip that is not full
      for (long d = 0; d < p.padded_dim; d += COLUMNS)
        memset(m.q_panels + d * padded_rows() + row * COLUMNS, 0, COLUMNS * sizeof(float));
      for (long d = 0; d < p.padded_value_dim; d += COLUMNS)
        memset(m.dout_panels + d * padded_rows() + row * COLUMNS, 0, COLUMNS * sizeof(float));
      m.shift[row] = INFINITE, m.share[row] = m.delta[row] = 0;
    }
  }

  // The statistics of rows [first, last) from their scores; those of unseen and NaN rows stay.
  __attribute__((noinline)) void find_from_scores(const Memory& m, long b, long h, long first,
                                                  long last) const {
    const Rows k = clean(p.key_rows(p.k, b, h, p.dim)), v = clean(p.key_rows(p.v, b, h, p.value_dim));
    float top[MOST_ROWS], total[MOST_ROWS], weighted[MOST_ROWS];
    for (long r = 0; r < last - first; r++) top[r] = -INFINITE, total[r] = weighted[r] = 0;
    for (int pass = 0; pass < 2; pass++) {
      for (long key = 0; key < p.k_len; key += block_k_) {
        const long end = least(key + block_k_, p.k_len);
        pack_transposed(m.k_transposed, k, key, end, m.line);
        if (pass) pack_transposed(m.v_transposed, v, key, end, m.line);
        for (long s = 0; s < last - first; s += ROWS) {
          const StripMask mask(p, b, h, first + s);
          const StripBias bias(p, b, h, first + s);
          for (long c = 0; c < end - key; c += COLUMNS) {
            if (!mask.sees(key + c)) continue;
            Sums scores, products;
            clear(scores), clear(products);
            multiply_strip(scores, m.q_strips + (first + s) * p.dim, m.k_transposed + c * p.dim, p.dim);
            if (p.soft_cap != 0) cap(scores, m.slopes);
            if (bias.given) bias.add(scores, key + c);
            if (pass) {
              subtract(scores, top + s, p.to_log2);
              multiply_strip(products, m.dout_strips + (first + s) * p.value_dim,
                             m.v_transposed + c * p.value_dim, p.value_dim);
            }
            if (mask.hides_some_of(key + c)) mask.hide(scores, key + c);
            for (int r = 0; r < ROWS; r++)
              for (int j = 0; j < VECTORS; j++) {
                if (!pass) {
                  const float found = largest(scores[r][j]);
                  top[s + r] = found > top[s + r] ? found : top[s + r];
                  continue;
                }
                const vec weight = exp2(scores[r][j]);
                const vec more = select(weight == vec{}, vec{}, weight * products[r][j]);
                total[s + r] += sum(weight), weighted[s + r] += sum(more);
              }
          }
        }
      }
      for (long r = 0; r < last - first && !pass; r++)
        top[r] = top[r] == -INFINITE ? 0 : top[r];
    }
    for (long r = 0; r < last - first; r++) {
      const long row = first + r;
      if (row >= p.rows() || m.share[row] == 0 || m.shift[row] != m.shift[row] || total[r] == 0)
        continue;
      float shift = top[r];
      if (p.sinks) {
        const float sink = p.sink(b, h * p.group + row % p.group);
        shift = sink > shift ? sink : shift;
        const float shrink = exp2(all((top[r] - shift) * p.to_log2))[0];
        weighted[r] *= shrink;
        total[r] = total[r] * shrink + exp2(all((sink - shift) * p.to_log2))[0];
      }
      const long at = p.lse_at(b, h, row);
      m.shift[row] = shift, m.share[row] = 1 / total[r];
      m.delta[row] = weighted[r] / total[r] - (dlse ? dlse[at] : 0);
    }
  }

  Rows clean(Rows rows) const {
    rows.clean = p.may_hide();
    return rows;
  }

  void add_block(const Memory& m, long b, long h, long key, long part_end) const {
    const long end = least(key + block_k_, part_end), count = end - key;
    const Rows k = clean(p.key_rows(p.k, b, h, p.dim)), v = clean(p.key_rows(p.v, b, h, p.value_dim));
    memset(m.dk, 0, block_k_ * p.padded_dim * sizeof(float));
    memset(m.dv, 0, block_k_ * p.padded_value_dim * sizeof(float));
    const Span rows = rows_that_see(b, key, end);
    if (rows.begin < rows.end) {
      pack_transposed(m.k_transposed, k, key, end, m.line);
      pack_transposed(m.v_transposed, v, key, end, m.line);
      pack_panels(m.k_panels, block_k_ * COLUMNS, k, key, end, m.line, p.scale);
      for (long i = count; i < round_up(count, COLUMNS); i++)
        for (long d = 0; d < p.padded_dim; d += COLUMNS)
          memset(m.k_panels + d * block_k_ + i * COLUMNS, 0, COLUMNS * sizeof(float));
    }
    for (long row = rows.begin; row < rows.end; row += block_q_)
      add_tile(m, b, h, row, least(row + block_q_, rows.end), key, end);
    for (long i = 0; i < count; i++) {
      write_row(dk.data, dk.type, k.at(key + i), p.dim, m.dk + i * p.padded_dim);
      write_row(dv.data, dv.type, v.at(key + i), p.value_dim, m.dv + i * p.padded_value_dim);
    }
  }

  void add_tile(const Memory& m, long b, long h, long first, long last, long key,
                long key_end) const {
    StripMask masks[MOST_ROWS / ROWS];
    StripBias biases[MOST_ROWS / ROWS];
    const long strips = (last - first) / ROWS;
    bool any = false;
    for (long s = 0; s < strips; s++) {
      masks[s] = StripMask(p, b, h, first + s * ROWS);
      biases[s] = StripBias(p, b, h, first + s * ROWS);
      any = any || (masks[s].begin < key_end && masks[s].end > key);
    }
    if (!any) return;
    const long width = round_up(key_end - key, COLUMNS);
    any = false;
    for (long c = 0; c < width; c += COLUMNS)
      for (long s = 0; s < strips; s++) {
        const bool seen = masks[s].sees(key + c);
        if (seen)
          weigh(m, first + s * ROWS, s * ROWS, key, c, masks[s], biases[s]);
        else
          clear_scores(m, s * ROWS, c);
        any = any || seen;
      }
    if (!any) return;
    // Strips of keys may reach beyond the last panel.
    for (long c = width; c < round_up(width, ROWS); c++)
      for (long r = 0; r < last - first; r++) m.weights[r * Scores::STRIDE + c] = m.slopes[r * Scores::STRIDE + c] = 0;
    for (long c = 0; c < key_end - key; c += ROWS) {
      const Span rows = rows_that_see(b, key + c, least(key + c + ROWS, key_end));
      const long from = most(rows.begin, first), until = least(rows.end, last);
      if (from >= until) continue;
      const long at = (from - first) * Scores::STRIDE + c;
      add_products(m.dv + c * p.padded_value_dim, p.padded_value_dim, m.weights + at, m.dout_panels,
                   from, until);
      add_products(m.dk + c * p.padded_dim, p.padded_dim, m.slopes + at, m.q_panels, from, until);
    }
    for (long s = 0; s < strips; s++) {
      const long from = most(0, masks[s].begin / COLUMNS * COLUMNS - key);
      const long until = least(width, round_up(masks[s].end, COLUMNS) - key);
      if (from >= until) continue;
      float* sums = m.dq + (first + s * ROWS) * p.padded_dim;
      for (long d = 0; d < p.padded_dim; d += COLUMNS) {
        Sums found;
        load_sums(found, sums + d, p.padded_dim);
        Scores::multiply_rows(found, m.slopes + s * ROWS * Scores::STRIDE + from,
                           m.k_panels + d * block_k_ + from * COLUMNS, until - from);
        store_sums(found, sums + d, p.padded_dim);
      }
    }
  }

  // sums += (a strip of the tile's columns)ᵀ * rows [from, until) of panels.
  EJ_INLINE void add_products(float* sums, long width, const float* tile, const float* panels,
                              long from, long until) const {
    for (long d = 0; d < width; d += COLUMNS) {
      Sums found;
      load_sums(found, sums + d, width);
      Scores::multiply_columns(found, tile, panels + d * padded_rows() + from * COLUMNS, until - from);
      store_sums(found, sums + d, width);
    }
  }

  // The weights of a strip of rows and a panel of keys, and the slopes of the loss in its scores.
  void weigh(const Memory& m, long row, long tile_row, long key, long c,
             const StripMask& mask, const StripBias& bias) const {
    float* weights = m.weights + tile_row * Scores::STRIDE + c;
    float* slopes = m.slopes + tile_row * Scores::STRIDE + c;
    Sums found;
    const bool capped = p.soft_cap != 0, plain = !capped && !bias.given && !exact;
    begin_below(found, plain ? m.shift + row : NOTHING);
    multiply_strip(found, m.q_strips + row * p.dim, m.k_transposed + c * p.dim, p.dim);
    if (__builtin_expect(!plain, 0)) {
      if (capped) cap(found, slopes);
      if (bias.given) bias.add(found, key + c);
      subtract(found, m.shift + row, p.to_log2);
    }
    const bool hides = mask.hides_some_of(key + c);
    if (__builtin_expect(hides, 0)) mask.hide(found, key + c);
    EJ_UNROLL for (int r = 0; r < ROWS; r += TOGETHER) {
      vec some[TOGETHER * VECTORS];
      EJ_UNROLL for (int i = 0; i < TOGETHER * VECTORS; i++)
        some[i] = found[r + i / VECTORS][i % VECTORS];
      exp2(some);
      EJ_UNROLL for (int i = 0; i < TOGETHER * VECTORS; i++)
        store(weights + (r + i / VECTORS) * Scores::STRIDE + i % VECTORS * LANES, some[i]);
    }
    begin_below(found, exact ? NOTHING : m.delta + row);
    multiply_strip(found, m.dout_strips + row * p.value_dim, m.v_transposed + c * p.value_dim,
                   p.value_dim);
    if (__builtin_expect(exact, 0)) subtract(found, m.delta + row);
    EJ_UNROLL for (int r = 0; r < ROWS; r++)
      EJ_UNROLL for (int j = 0; j < VECTORS; j++) {
        const vec weight = load(weights + r * Scores::STRIDE + j * LANES);
        vec slope = weight * found[r][j];
        if (__builtin_expect(capped, 0)) slope *= load(slopes + r * Scores::STRIDE + j * LANES);
        // Zero times what is too large for a number would be NaN.
        if (__builtin_expect(hides, 0)) slope = select(weight == vec{}, vec{}, slope);
        store(slopes + r * Scores::STRIDE + j * LANES, slope);
      }
  }

  // Caps scores and leaves the derivative of the cap where the slopes will be.
  __attribute__((noinline)) void cap(Sums& scores, float* derivative) const {
    for (int r = 0; r < ROWS; r++)
      for (int j = 0; j < VECTORS; j++) {
        const vec t = tanh(scores[r][j] * (1 / (p.unit * p.soft_cap)));
        scores[r][j] = t * (p.soft_cap * p.unit);
        store(derivative + r * Scores::STRIDE + j * LANES, 1.0f - t * t);
      }
  }

  void clear_scores(const Memory& m, long tile_row, long c) const {
    Sums zeros;
    clear(zeros);
    store_sums(zeros, m.weights + tile_row * Scores::STRIDE + c, Scores::STRIDE);
    store_sums(zeros, m.slopes + tile_row * Scores::STRIDE + c, Scores::STRIDE);
  }

  void write_dq(const float* from, long b, long h, long row) const {
    write_row(dq.data, dq.type, p.query_rows(dq, b, h, p.dim).at(row), p.dim, from);
  }

  const Problem& p;
  long block_q_, block_k_, parts_, blocks_per_part_;
};

}  // namespace ejkernel

#endif
