// The sizes and options of a call, and which keys a query sees.
#ifndef EJKERNEL_FLASH_PROBLEM_H_
#define EJKERNEL_FLASH_PROBLEM_H_

#include "tiles.h"

namespace ejkernel {

// Keys [begin, end) that a query sees; segments may take some of them away.
struct Seen {
  int32_t begin, end;
};

// Something for every query and key: (batch, heads, queries, keys), of which axes may be 1.
template <typename T>
struct Table {
  const T* data = nullptr;  // null: there is none
  long heads, queries, keys;
  long same_for;  // examples that follow each other and have the same

  const T* row(long b, long head, long query) const {
    const long h = heads == 1 ? 0 : head, q = queries == 1 ? 0 : query;
    return data + ((b / same_for * heads + h) * queries + q) * keys;
  }
};

struct Problem {
  long batch, q_len, k_len, heads, kv_heads, group, dim, value_dim;
  long padded_keys, padded_dim, padded_value_dim;
  bool causal;
  long left, right;  // of the window; below 0: no limit
  long block_q, block_k;
  float scale, soft_cap;  // 0: no cap
  // Scores are kept as logarithms to base 2. But a bias can be so large that rounding leaves nothing
  // else of a score, and what it leaves depends on the unit: with one, scores are what users know.
  float unit, to_log2;
  Array q, k, v;
  Paging k_paging, v_paging;  // of one sequence whose keys lie in pages
  long offset = 0;            // the position of the first query
  const int32_t *q_lengths, *kv_lengths, *q_segments, *k_segments;  // or null
  const float* sinks = nullptr;                                     // or null
  long sinks_same_for = 1;  // examples that follow each other and have the same
  Table<uint8_t> mask;  // not 0 where a query may see a key
  Table<float> bias;    // added to the scores

  bool may_hide() const {
    return causal || left >= 0 || right >= 0 || q_lengths || kv_lengths || q_segments || mask.data ||
           bias.data;
  }
  float sink(long b, long head) const { return sinks[b / sinks_same_for * heads + head] * unit; }

  // The rows of a key head: its queries, each with all the heads of the group.
  long rows() const { return q_len * group; }
  bool has_segments() const { return q_segments != nullptr; }

  Rows query_rows(const Array& x, long b, long h, long width) const {
    return {x.data, x.type, width, (b * q_len * heads + h * group) * width, heads * width, group};
  }
  Rows key_rows(const Array& x, long b, long h, long width, const Paging& paging = {}) const {
    Rows rows{x.data, x.type, width, (b * k_len * kv_heads + h) * width, kv_heads * width, 1};
    if (paging.table) rows.paging = &paging, rows.head = h;
    return rows;
  }
  long lse_at(long b, long h, long row) const {
    return (b * heads + h * group + row % group) * q_len + row / group;
  }

  // What a table has for a row of a key head.
  template <typename T>
  const T* row_of(const Table<T>& table, long b, long h, long row) const {
    return table.row(b, h * group + row % group, row / group);
  }

  long queries_of(long b) const {
    return q_lengths ? most(0, least(q_len, q_lengths[b])) : q_len;
  }
  long keys_of(long b) const { return kv_lengths ? most(0, least(k_len, kv_lengths[b])) : k_len; }

  Seen seen(long b, long row) const {
    const long i = row / group + offset;
    if (row / group >= queries_of(b)) return {0, 0};
    long begin = left >= 0 ? most(0, i - left) : 0;
    long end = keys_of(b);
    if (causal) end = least(end, i + 1);
    if (right >= 0) end = least(end, i + right + 1);
    return {int32_t(least(begin, end)), int32_t(end)};
  }
  int32_t q_segment(long b, long row) const { return q_segments[b * q_len + row / group]; }

  // Reads what both handlers have in common; null if all is well, else what is wrong.
  const char* read(const Call& call) {
    q = call.argument(0), k = call.argument(1), v = call.argument(2);
    if (q.rank < 4 || k.rank != q.rank || v.rank != q.rank) return "q, k, v must have four axes";
    if (!is_floating(q.type) || k.type != q.type || v.type != q.type)
      return "q, k, v must be float32, bfloat16 or float16, all of them the same";
    q_len = q.last(3), heads = q.last(2), dim = q.last(1);
    k_len = k.last(3), kv_heads = k.last(2), value_dim = v.last(1);
    if (!q_len || !k_len || !heads || !kv_heads || !dim || !value_dim || heads % kv_heads ||
        k.last(1) != dim || v.last(3) != k_len || v.last(2) != kv_heads)
      return "the shapes of q, k and v do not belong together";
    batch = q.size() / (q_len * heads * dim);
    if (k.size() != batch * k_len * kv_heads * dim || v.size() != batch * k_len * kv_heads * value_dim)
      return "q, k and v must have the same batch";
    group = heads / kv_heads;
    padded_keys = round_up(k_len, COLUMNS);
    padded_dim = round_up(dim, COLUMNS);
    padded_value_dim = round_up(value_dim, COLUMNS);
    causal = call.integer("causal");
    // A window beyond all positions is none: sums with it must not overflow.
    left = least(call.integer("left", -1), q_len + k_len);
    right = least(call.integer("right", -1), q_len + k_len);
    scale = call.number("scale"), soft_cap = call.number("soft_cap");
    block_q = call.integer("block_q"), block_k = call.integer("block_k");
    if (block_q < 1 || block_k < 1) return "block_q and block_k must be at least 1";
    if (!__builtin_isfinite(scale) || !__builtin_isfinite(soft_cap) || soft_cap < 0)
      return "scale and soft_cap must be finite, and soft_cap not negative";
    if (!fits(call.argument(3), Type::int32, batch) || !fits(call.argument(4), Type::int32, batch))
      return "q_lengths and kv_lengths must be int32, one for each example";
    if (!fits(call.argument(5), Type::int32, batch * q_len) ||
        !fits(call.argument(6), Type::int32, batch * k_len) ||
        !call.argument(5).size() != !call.argument(6).size())
      return "segments must be int32, one for each query and one for each key";
    q_lengths = optional<int32_t>(call.argument(3));
    kv_lengths = optional<int32_t>(call.argument(4));
    q_segments = optional<int32_t>(call.argument(5));
    k_segments = optional<int32_t>(call.argument(6));
    if (!read_table(mask, call.argument(7), Type::boolean))
      return "mask must be boolean and broadcast to (batch, heads, q_len, kv_len)";
    if (!read_table(bias, call.argument(8), Type::float32))
      return "bias must be float32 and broadcast to (batch, heads, q_len, kv_len)";
    unit = bias.data ? 1 : LOG2_E, to_log2 = bias.data ? LOG2_E : 1;
    const Array given = call.argument(9);
    sinks = optional<float>(given);
    if (sinks) {
      const long examples = given.size() / heads;
      if (given.type != Type::float32 || examples == 0 || given.size() % heads || batch % examples)
        return "sinks must be float32, one for each query head";
      sinks_same_for = batch / examples;
    }
    return nullptr;
  }

  // True for an array with so many numbers of this type, and for one that is not given.
  static bool fits(const Array& x, Type type, long count) {
    return x.size() == 0 || (x.type == type && x.size() == count);
  }

  // False if the array is not of this type, or does not fit.
  template <typename T>
  bool read_table(Table<T>& table, const Array& x, Type type) const {
    if (x.size() == 0) return true;
    table.heads = x.last(3), table.queries = x.last(2), table.keys = x.last(1);
    const long of_an_example = table.heads * table.queries * table.keys;
    const long examples = of_an_example ? x.size() / of_an_example : 0;
    if (x.type != type || (table.heads != 1 && table.heads != heads) ||
        (table.queries != 1 && table.queries != q_len) ||
        (table.keys != 1 && table.keys != k_len) || examples == 0 || batch % examples)
      return false;
    table.data = optional<T>(x);
    // vmap adds the same axes to all arrays, so one table for all its examples is repeated.
    table.same_for = batch / examples;
    return true;
  }

  // An option that is not given comes as an array without numbers.
  template <typename T>
  static const T* optional(const Array& x) {
    return x.size() ? static_cast<const T*>(x.data) : nullptr;
  }
};

// Smallest and largest segment of some rows or keys.
struct Segments {
  int32_t least, most;
  bool disjoint(Segments other) const { return most < other.least || other.most < least; }
  bool one() const { return least == most; }
};

inline Segments segments_of(const int32_t* ids, long count) {
  Segments found{ids[0], ids[0]};
  for (long i = 1; i < count; i++) {
    found.least = ids[i] < found.least ? ids[i] : found.least;
    found.most = ids[i] > found.most ? ids[i] : found.most;
  }
  return found;
}

// What is seen by the ROWS rows of a strip, and how to hide the rest.
struct StripMask {
  Seen seen[ROWS];
  int32_t segment[ROWS];
  Segments own;
  long begin, end;          // keys that any row sees
  long all_begin, all_end;  // keys that all rows see
  const int32_t* ids;       // segments of the keys, or null
  const uint8_t* allowed[ROWS];  // the rows of the mask
  bool masked;                   // there are such rows
  long k_len;

  StripMask() = default;
  StripMask(const Problem& p, long b, long h, long row) {
    ids = p.has_segments() ? p.k_segments + b * p.k_len : nullptr;
    masked = p.mask.data != nullptr && p.mask.keys > 1;
    k_len = p.k_len;
    begin = all_end = p.k_len, end = all_begin = 0;
    for (long r = 0; r < ROWS; r++) {
      // Rows that only fill up the strip see what the last real one sees.
      const long real = ejkernel::least(row + r, p.rows() - 1);
      seen[r] = p.seen(b, real);
      if (p.mask.data) {
        allowed[r] = p.row_of(p.mask, b, h, real);
        if (!masked && !*allowed[r]) seen[r] = {0, 0};
      }
      segment[r] = ids ? p.q_segment(b, real) : 0;
      if (seen[r].begin < seen[r].end) {
        begin = ejkernel::least(begin, seen[r].begin), end = ejkernel::most(end, seen[r].end);
      }
      all_begin = ejkernel::most(all_begin, seen[r].begin);
      all_end = ejkernel::least(all_end, seen[r].end);
    }
    if (ids) own = segments_of(segment, ROWS);
  }

  bool sees(long key) const {
    return key < end && key + COLUMNS > begin && !(ids && own.disjoint(of_keys(key))) &&
           (!masked || allows_some_of(key));
  }
  bool hides_some_of(long key) const {
    if (key < all_begin || key + COLUMNS > all_end) return true;
    if (masked && !allows_all_of(key)) return true;
    if (ids == nullptr) return false;
    const Segments keys = of_keys(key);
    return !own.one() || !keys.one() || own.least != keys.least;
  }

  // Scores of keys [key, key + COLUMNS) that are not seen become minus infinity.
  EJ_INLINE void hide(Sums& scores, long key) const {
    for (int r = 0; r < ROWS; r++)
      for (int j = 0; j < VECTORS; j++)
        scores[r][j] = select(visible(r, key + j * LANES), scores[r][j], all(-INFINITE));
  }

 private:
  Segments of_keys(long key) const {
    return segments_of(ids + key, ejkernel::least(COLUMNS, k_len - key));
  }

  // Of all rows; keys that do not exist are not allowed.
  bool allows_some_of(long key) const {
    const long count = ejkernel::least(COLUMNS, k_len - key);
    uint8_t found = 0;
    for (int r = 0; r < ROWS; r++)
      for (long c = 0; c < count; c++) found |= allowed[r][key + c];
    return found;
  }
  bool allows_all_of(long key) const {  // where all of them exist
    uint8_t found = 1;
    for (int r = 0; r < ROWS; r++)
      for (long c = 0; c < COLUMNS; c++) found &= allowed[r][key + c];
    return found;
  }

  EJ_INLINE ivec visible(int r, long key) const {
    ivec keys = counting() + int32_t(key);
    ivec mask = (keys >= all(seen[r].begin)) & (keys < all(seen[r].end));
    if (masked) {
      bytes found = {};
      if (key + LANES <= k_len)
        memcpy(&found, allowed[r] + key, LANES);
      else
        for (long c = 0; key + c < k_len; c++) found[c] = allowed[r][key + c];
      mask &= __builtin_convertvector(found, ivec) != 0;
    }
    if (ids == nullptr) return mask;
    ivec found = {};
    for (long c = 0; c < LANES && key + c < k_len; c++) found[c] = ids[key + c];
    return mask & (found == all(segment[r]));
  }
};

// The bias of the ROWS rows of a strip.
struct StripBias {
  const float* rows[ROWS];
  bool given, one;  // one: the same number for all keys
  long k_len;

  StripBias() = default;
  StripBias(const Problem& p, long b, long h, long row) {
    given = p.bias.data != nullptr, one = given && p.bias.keys == 1, k_len = p.k_len;
    if (!given) return;
    for (long r = 0; r < ROWS; r++) {
      const long real = least(row + r, p.rows() - 1);
      rows[r] = p.row_of(p.bias, b, h, real);
    }
  }

  EJ_INLINE void add(Sums& scores, long key) const {
    for (int r = 0; r < ROWS; r++)
      for (int j = 0; j < VECTORS; j++)
        scores[r][j] += one ? all(*rows[r]) : part(rows[r], key + j * LANES);
  }

 private:
  EJ_INLINE vec part(const float* row, long key) const {
    if (key + LANES <= k_len) return load(row + key);
    vec found = {};
    for (long c = 0; key + c < k_len; c++) found[c] = row[key + c];
    return found;
  }
};

}  // namespace ejkernel

#endif
