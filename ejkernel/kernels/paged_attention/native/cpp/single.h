// Attention of a few query rows over keys in pages, at the speed of memory: keys and values are read
// where they lie, once, in the order of memory.
//
// A task has all heads of some keys of one sequence. It leaves, for every row, the sum of its weights
// and weighted values relative to its largest score; those of a sequence's tasks are then joined.
#ifndef EJKERNEL_PAGED_SINGLE_H_
#define EJKERNEL_PAGED_SINGLE_H_

#include "problem.h"

namespace ejkernel {

// --- vectors of float32 from numbers of any type ---

typedef uint32_t uvec __attribute__((vector_size(sizeof(uint32_t) * LANES)));
typedef uint16_t halves __attribute__((vector_size(sizeof(uint16_t) * LANES)));

template <Type type>
struct Number;
template <>
struct Number<Type::float32> {
  typedef float Stored;
  static EJ_INLINE vec widen(const float* from) { return load(from); }
};
template <>
struct Number<Type::bfloat16> {
  typedef uint16_t Stored;
  static EJ_INLINE vec widen(const uint16_t* from) {
    halves x;
    memcpy(&x, from, sizeof x);
    return (vec)(__builtin_convertvector(x, uvec) << 16);
  }
};
template <>
struct Number<Type::float16> {
  typedef uint16_t Stored;
  static EJ_INLINE vec widen(const uint16_t* from) {
    halves x;
    memcpy(&x, from, sizeof x);
    return of(__builtin_convertvector(x, uvec));
  }
  // As `from_float16`.
  static EJ_INLINE vec of(uvec x) {
    ivec magnitude = (ivec)(x & 0x7fff);
    ivec bits = (magnitude << 13) + ((127 - 15) << 23);
    bits |= (magnitude >= 0x7c00) & 0x7f800000;
    vec small = __builtin_convertvector(magnitude, vec) * 0x1p-24f;
    return (vec)((ivec)select(magnitude < 0x400, small, (vec)bits) | (ivec)((x & 0x8000) << 16));
  }
};
template <>
struct Number<Type::int8> {
  typedef int8_t Stored;
  static EJ_INLINE vec widen(const int8_t* from) {
    return __builtin_convertvector(ejkernel::widen(from), vec);
  }
};
template <>
struct Number<Type::float8_e4m3> {
  typedef int8_t Stored;
  static EJ_INLINE vec widen(const int8_t* from) {
    ivec wide = ejkernel::widen(from), magnitude = wide & 0x7f;
    ivec bits = (magnitude << 20) + ((127 - 7) << 23);
    bits |= (magnitude == 0x7f) & 0x7fc00000;
    vec small = __builtin_convertvector(magnitude, vec) * 0x1p-9f;
    return (vec)((ivec)select(magnitude < 8, small, (vec)bits) | (wide & INT32_MIN));
  }
};
template <>
struct Number<Type::float8_e5m2> {
  typedef int8_t Stored;
  static EJ_INLINE vec widen(const int8_t* from) {
    return Number<Type::float16>::of((uvec)ejkernel::widen(from) << 8 & 0xffff);
  }
};

// The first `count` numbers, and zeros.
template <Type type>
EJ_INLINE vec widen_some(const typename Number<type>::Stored* from, long count) {
  typename Number<type>::Stored part[LANES] = {};
  memcpy(part, from, count * sizeof part[0]);
  return Number<type>::widen(part);
}

// --- products with the rows of a few keys ---

constexpr long BLOCK = 32;  // keys whose scores are computed before their values are added
constexpr long AHEAD = 4;   // keys between what is read and what is fetched

// Where memory is that will be read soon: as many bytes from each key, and from each value.
struct Soon {
  const void* const* keys;
  const void* const* values;
  long key, key_end, value, value_end;  // in bytes, of one head
};

// Scores of R rows with TOKENS keys; rows of `scores` are BLOCK apart.
template <Type type, int R, int TOKENS>
EJ_INLINE void score_keys(float* scores, const float* q, long stride, const void* const* keys,
                          long first, long dim, const Soon* soon) {
  typedef typename Number<type>::Stored Stored;
  constexpr int COUNT = R * TOKENS;
  constexpr long LINE = most(LANES, 64 / long(sizeof(Stored)));
  vec sums[round_up(COUNT, LANES)] = {};
  const Stored* rows[TOKENS];
  EJ_UNROLL for (int t = 0; t < TOKENS; t++) rows[t] = static_cast<const Stored*>(keys[t]) + first;
  auto step = [&](long d) __attribute__((always_inline)) {
    vec line[TOKENS];
    EJ_UNROLL for (int t = 0; t < TOKENS; t++) line[t] = Number<type>::widen(rows[t] + d);
    EJ_UNROLL for (int r = 0; r < R; r++) {
      vec x = load(q + r * stride + d);
      EJ_UNROLL for (int t = 0; t < TOKENS; t++) sums[r * TOKENS + t] += x * line[t];
    }
  };
  long d = 0, key = 0, value = 0;
  if (soon) key = soon->key, value = soon->value;
  for (; d + LINE <= dim; d += LINE) {
    if (soon) {  // requests between products: a burst of them would wait for each other
      EJ_UNROLL for (int t = 0; t < TOKENS; t++) {
        __builtin_prefetch(static_cast<const char*>(soon->keys[t]) + key);
        if (value < soon->value_end)
          __builtin_prefetch(static_cast<const char*>(soon->values[t]) + value, 0, 2);
      }
      key += 64, value += 64;
    }
    EJ_UNROLL for (long i = 0; i < LINE; i += LANES) step(d + i);
  }
  for (; d + LANES <= dim; d += LANES) step(d);
  if (soon)
    for (int t = 0; t < TOKENS; t++) {
      for (long b = key; b < soon->key_end; b += 64)
        __builtin_prefetch(static_cast<const char*>(soon->keys[t]) + b);
      for (long b = value; b < soon->value_end; b += 64)
        __builtin_prefetch(static_cast<const char*>(soon->values[t]) + b, 0, 2);
    }
  if (d < dim)
    for (int t = 0; t < TOKENS; t++) {
      vec line = widen_some<type>(rows[t] + d, dim - d);
      for (int r = 0; r < R; r++) sums[r * TOKENS + t] += load(q + r * stride + d) * line;
    }
  EJ_UNROLL for (int i = 0; i < COUNT; i += LANES) {
    vec part[LANES];
    EJ_UNROLL for (int j = 0; j < LANES; j++) part[j] = sums[i + j];
    const vec total = sums_of(part);
    EJ_UNROLL for (int j = 0; j < LANES; j++)
      if (i + j < COUNT) scores[(i + j) / TOKENS * BLOCK + (i + j) % TOKENS] = total[j];
  }
}

// Keys that are worked on together, so that their sums with R rows fill the registers.
constexpr long together(long rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }

// Of R rows with some keys of a block.
template <Type type, int R>
EJ_INLINE void score_rows(float* scores, const float* q, long stride, const void* const* keys,
                          long from, long until, long first, long dim, Soon* soon) {
  constexpr int TOKENS = together(R);
  long t = from;
  for (; t + TOKENS <= until; t += TOKENS)
    score_keys<type, R, TOKENS>(scores + t, q, stride, keys + t, first, dim, soon);
  for (; t < until; t++) score_keys<type, R, 1>(scores + t, q, stride, keys + t, first, dim, nullptr);
}

// Some bytes of every key of the next block, fetched while values are added: memory is never idle.
struct Next {
  const void* const* keys;
  long from, until;
};

// sums += weights * values, for R rows and V vectors of every value.
template <Type type, int R, int V>
EJ_INLINE void add_values(float* sums, long stride, const float* weights, const void* const* values,
                          long count, long first, Next next) {
  typedef typename Number<type>::Stored Stored;
  vec found[R][V];
  EJ_UNROLL for (int r = 0; r < R; r++)
    EJ_UNROLL for (int j = 0; j < V; j++) found[r][j] = load(sums + r * stride + j * LANES);
  for (long t = 0; t < count; t++) {
    const Stored* row = static_cast<const Stored*>(values[t]) + first;
    for (long b = next.from; b < next.until; b += 64)
      __builtin_prefetch(static_cast<const char*>(next.keys[t]) + b, 0, 2);
    vec line[V];
    EJ_UNROLL for (int j = 0; j < V; j++) line[j] = Number<type>::widen(row + j * LANES);
    EJ_UNROLL for (int r = 0; r < R; r++) {
      vec weight = all(weights[r * BLOCK + t]);
      EJ_UNROLL for (int j = 0; j < V; j++) found[r][j] += weight * line[j];
    }
  }
  EJ_UNROLL for (int r = 0; r < R; r++)
    EJ_UNROLL for (int j = 0; j < V; j++) store(sums + r * stride + j * LANES, found[r][j]);
}

template <Type type, int R>
EJ_INLINE void add_rows(float* sums, long stride, const float* weights, const void* const* values,
                        long count, long first, long dim, Next next) {
  typedef typename Number<type>::Stored Stored;
  constexpr int V = together(R);
  // The lines of the keys are shared out to the steps.
  const long lines = ceil_div(next.until - next.from, 64), steps = most(1, dim / (V * LANES));
  long d = 0;
  for (long i = 0; d + V * LANES <= dim; d += V * LANES, i++)
    add_values<type, R, V>(sums + d, stride, weights, values, count, first + d,
                           {next.keys, next.from + lines * i / steps * 64,
                            next.from + lines * (i + 1) / steps * 64});
  for (; d + LANES <= dim; d += LANES)
    add_values<type, R, 1>(sums + d, stride, weights, values, count, first + d, Next{});
  if (d == dim) return;
  for (long t = 0; t < count; t++) {
    vec line = widen_some<type>(static_cast<const Stored*>(values[t]) + first + d, dim - d);
    for (int r = 0; r < R; r++) {
      float* place = sums + r * stride + d;
      store(place, load(place) + weights[r * BLOCK + t] * line);
    }
  }
}

// What a task reads, all heads of it.
struct Few {
  long heads, rows, dim, stride;  // key heads, and the rows of each; `stride` between rows of floats
};

// Keys come a few at a time with all their heads, as they lie in memory; what comes next, and the
// block's values, are fetched meanwhile.
template <Type type>
void score_block(float* scores, const float* q, const Few& x, const void* const* keys,
                 const void* const* values, long value_bytes, long count) {
  constexpr long BYTES = sizeof(typename Number<type>::Stored);
  const long at_once = together(x.rows % 4 == 0 ? 4 : x.rows % 4);
  for (long t = 0; t < count; t += at_once) {
    const long until = least(count, t + at_once);
    for (long h = 0; h < x.heads; h++) {
      const long first = h * x.dim;
      Soon ahead{keys + t + AHEAD, values + t, first * BYTES, (first + x.dim) * BYTES,
                 h * value_bytes, (h + 1) * value_bytes};
      for (long r = 0; r < x.rows; r += 4) {
        float* to = scores + (h * x.rows + r) * BLOCK;
        const float* from = q + (h * x.rows + r) * x.stride;
        Soon* soon = r == 0 ? &ahead : nullptr;
        switch (least(4, x.rows - r)) {
          case 1: score_rows<type, 1>(to, from, x.stride, keys, t, until, first, x.dim, soon); break;
          case 2: score_rows<type, 2>(to, from, x.stride, keys, t, until, first, x.dim, soon); break;
          case 3: score_rows<type, 3>(to, from, x.stride, keys, t, until, first, x.dim, soon); break;
          default: score_rows<type, 4>(to, from, x.stride, keys, t, until, first, x.dim, soon);
        }
      }
    }
  }
}

template <Type type>
void add_block(float* sums, const float* weights, const Few& x, const void* const* values,
               const void* const* keys, long key_bytes, long count) {
  for (long h = 0; h < x.heads; h++)
    for (long r = 0; r < x.rows; r += 4) {
      const Next next{keys, h * key_bytes, r == 0 ? (h + 1) * key_bytes : h * key_bytes};
      float* to = sums + (h * x.rows + r) * x.stride;
      const float* from = weights + (h * x.rows + r) * BLOCK;
      switch (least(4, x.rows - r)) {
        case 1: add_rows<type, 1>(to, x.stride, from, values, count, h * x.dim, x.dim, next); break;
        case 2: add_rows<type, 2>(to, x.stride, from, values, count, h * x.dim, x.dim, next); break;
        case 3: add_rows<type, 3>(to, x.stride, from, values, count, h * x.dim, x.dim, next); break;
        default: add_rows<type, 4>(to, x.stride, from, values, count, h * x.dim, x.dim, next);
      }
    }
}

#define EJ_BY_TYPE(type, function, ...)                                              \
  switch (type) {                                                                    \
    case Type::float32: function<Type::float32>(__VA_ARGS__); break;                 \
    case Type::bfloat16: function<Type::bfloat16>(__VA_ARGS__); break;               \
    case Type::float16: function<Type::float16>(__VA_ARGS__); break;                 \
    case Type::int8: function<Type::int8>(__VA_ARGS__); break;                       \
    case Type::float8_e4m3: function<Type::float8_e4m3>(__VA_ARGS__); break;         \
    default: function<Type::float8_e5m2>(__VA_ARGS__);                               \
  }

// --- a task -------------------------------------------------------------------------------------

// Keys [from, until) of a sequence; `problem` is that sequence, alone in its batch.
struct Task {
  const Problem* problem;
  long from, until;
  float* found;  // for every row its largest score, its sum of weights, and then the weighted values

  static constexpr long MOST_KEYS = 1024, FURTHER = BLOCK + AHEAD;
  static long rows(const Problem& p) { return p.kv_heads * p.rows(); }
  static long size(const Problem& p) { return rows(p) * (2 + round_up(p.value_dim, LANES)); }
  static long scratch_size(const Problem& p) {
    return Scratch::padded(rows(p) * round_up(p.dim, LANES)) + (rows(p) + 2 * p.kv_heads) * BLOCK;
  }

  void run(float* scratch) const {
    const Problem& p = *problem;
    const Few k{p.kv_heads, p.rows(), p.dim, round_up(p.dim, LANES)};
    const Few v{p.kv_heads, p.rows(), p.value_dim, round_up(p.value_dim, LANES)};
    const long count = rows(p), keys = until - from;
    float *q = scratch, *scores = scratch + Scratch::padded(count * k.stride);
    float *largest_of = found, *total_of = found + count, *sums = found + 2 * count;
    memset(q, 0, count * k.stride * sizeof(float));
    memset(sums, 0, count * v.stride * sizeof(float));
    for (long i = 0; i < count; i++) {
      const long h = i / k.rows, row = i % k.rows;
      read_row(q + i * k.stride, p.q.data, p.q.type, p.query_rows(p.q, 0, h, p.dim).at(row), p.dim,
               p.scale * LOG2_E);
      largest_of[i] = -INFINITE, total_of[i] = 0;
    }
    const void *k_rows[MOST_KEYS + FURTHER], *v_rows[MOST_KEYS + FURTHER];
    const float *k_scales[MOST_KEYS], *v_scales[MOST_KEYS];  // of all heads of a key
    for (long i = 0, slot = from % p.k_paging.size, page = from / p.k_paging.size; i < keys; i++) {
      const long number = p.k_paging.table[page], key = number * p.k_paging.size + slot;
      k_rows[i] = row_of(p.k, key, p.kv_heads * p.dim);
      v_rows[i] = row_of(p.v, key, p.kv_heads * p.value_dim);
      k_scales[i] = scales_of(p.k_paging, number, slot);
      v_scales[i] = scales_of(p.v_paging, number, slot);
      if (++slot == p.k_paging.size) slot = 0, page++;
    }
    for (long i = keys; i < keys + FURTHER; i++)
      k_rows[i] = k_rows[keys - 1], v_rows[i] = v_rows[keys - 1];
    float* factors = scores + count * BLOCK;  // of keys, and of values: those of every head
    for (long key = 0; key < keys; key += BLOCK) {
      const long block = least(BLOCK, keys - key);
      for (long h = 0; h < p.kv_heads; h++)
        for (long c = 0; c < block; c++) {
          if (p.k_paging.scale) factors[h * BLOCK + c] = k_scales[key + c][h];
          if (p.v_paging.scale) factors[(p.kv_heads + h) * BLOCK + c] = v_scales[key + c][h];
        }
      EJ_BY_TYPE(p.k.type, score_block, scores, q, k, k_rows + key, v_rows + key,
                 p.value_dim * bytes_of(p.v.type), block)
      for (long i = 0; i < count; i++)
        weigh(scores + i * BLOCK, factors + i / k.rows * BLOCK, from + key, block, i, largest_of,
              total_of, sums + i * v.stride);
      EJ_BY_TYPE(p.v.type, add_block, sums, scores, v, v_rows + key, k_rows + key + BLOCK,
                 p.dim * bytes_of(p.k.type), block)
    }
  }

  // Joins the tasks of a sequence, and writes its rows.
  static void join(const Task* tasks, long count, const Array& out) {
    const Problem& p = *tasks->problem;
    const long every = rows(p), stride = round_up(p.value_dim, LANES);
    for (long i = 0; i < every; i++) {
      const long h = i / p.rows(), row = i % p.rows();
      float reference = -INFINITE, total = 0;
      for (long t = 0; t < count; t++)
        if (tasks[t].found[i] > reference) reference = tasks[t].found[i];
      const bool empty = reference == -INFINITE;
      if (p.sinks && !empty) {
        const float sink = p.sink(0, h * p.group + row % p.group);
        reference = sink > reference ? sink : reference;
        total = __builtin_exp2f(sink - reference);
      }
      float* sums = tasks[0].found + 2 * every + i * stride;
      for (long t = 0; t < count; t++) {
        const float shrink = empty ? 0 : __builtin_exp2f(tasks[t].found[i] - reference);
        const float* part = tasks[t].found + 2 * every + i * stride;
        total += shrink * tasks[t].found[every + i];
        if (t == 0)
          for (long d = 0; d < stride; d++) sums[d] *= shrink;
        else
          for (long d = 0; d < stride; d++) sums[d] += shrink * part[d];
      }
      write_row(out.data, out.type, p.query_rows(out, 0, h, p.value_dim).at(row), p.value_dim, sums,
                total == 0 ? 0 : 1 / total);
    }
  }

 private:
  static const void* row_of(const Array& pages, long slot, long width) {
    return static_cast<const char*>(pages.data) + slot * width * bytes_of(pages.type);
  }
  static const float* scales_of(const Paging& paging, long page, long slot) {
    return paging.scale + page * paging.scale_page + slot * paging.scale_slot;
  }

  // Scores of a row become weights; its sums become relative to a new largest score.
  void weigh(float* scores, const float* factors, long key, long count, long i, float* largest_of,
             float* total_of, float* sums) const {
    const Problem& p = *problem;
    const Seen seen = p.seen(0, i % p.rows());
    const long padded = round_up(count, LANES);
    for (long c = count; c < padded; c++) scores[c] = -INFINITE;
    if (p.k_paging.scale)
      for (long c = 0; c < count; c++) scores[c] *= factors[c];
    if (p.soft_cap != 0)
      for (long c = 0; c < padded; c += LANES)
        store(scores + c, tanh(load(scores + c) * (1 / (LOG2_E * p.soft_cap))) *
                              (p.soft_cap * LOG2_E));
    if (key < seen.begin || key + padded > seen.end)
      for (long c = 0; c < padded; c++)
        if (key + c < seen.begin || key + c >= seen.end) scores[c] = -INFINITE;
    vec top = all(-INFINITE);
    for (long c = 0; c < padded; c += LANES) top = larger(load(scores + c), top);
    const float before = largest_of[i], block = largest(top);
    const float reference = block > before ? block : before;
    const float shift = reference == -INFINITE ? 0 : reference;
    if (reference != before) {
      const float shrink = before == -INFINITE ? 0 : __builtin_exp2f(before - reference);
      total_of[i] *= shrink, largest_of[i] = reference;
      for (long d = 0; d < round_up(p.value_dim, LANES); d += LANES)
        store(sums + d, load(sums + d) * shrink);
    }
    vec total = vec{};
    for (long c = 0; c < padded; c += LANES) {
      vec weight = exp2(load(scores + c) - shift);
      total += weight;
      store(scores + c, weight);
    }
    total_of[i] += sum(total);
    if (p.v_paging.scale)
      for (long c = 0; c < count; c++) scores[c] *= factors[p.kv_heads * BLOCK + c];
  }
};

}  // namespace ejkernel

#endif
