// Products of small matrices that live in registers, and the layouts they read.
//
// A product of (ROWS x depth) and (depth x COLUMNS) keeps its result in registers and reads, per
// step of the depth, COLUMNS numbers of the right matrix and ROWS of the left one.
//
// Right matrices are kept in *panels*: COLUMNS columns after each other, each panel row by row, so
// that a product reads one line after the next. Left matrices are kept in *strips* of ROWS rows,
// column by column; or they are the score tile, read along its rows or along its columns.
#ifndef EJKERNEL_FLASH_TILES_H_
#define EJKERNEL_FLASH_TILES_H_

#include "ejkernel_numbers.h"
#include "ejkernel_simd.h"

namespace ejkernel {

// As many sums as the registers hold beside a line of the right and a number of the left matrix.
constexpr long VECTORS = REGISTERS == 32 && LANES == 4 ? 4 : 2;
constexpr long ROWS = REGISTERS == 32 && VECTORS == 2 ? 12 : 6;
constexpr long COLUMNS = VECTORS * LANES;
constexpr long TOGETHER = 2;  // rows whose weights are computed at the same time

EJ_INLINE constexpr long ceil_div(long a, long b) { return (a + b - 1) / b; }
EJ_INLINE constexpr long round_up(long a, long b) { return ceil_div(a, b) * b; }
EJ_INLINE constexpr long least(long a, long b) { return a < b ? a : b; }
EJ_INLINE constexpr long most(long a, long b) { return a > b ? a : b; }

typedef vec Sums[ROWS][VECTORS];

EJ_INLINE void clear(Sums& sums) {
  EJ_UNROLL for (int r = 0; r < ROWS; r++)
    EJ_UNROLL for (int j = 0; j < VECTORS; j++) sums[r][j] = vec{};
}

// Sums that begin with minus a number per row: it need not be subtracted afterwards.
EJ_INLINE void begin_below(Sums& sums, const float* numbers) {
  EJ_UNROLL for (int r = 0; r < ROWS; r++)
    EJ_UNROLL for (int j = 0; j < VECTORS; j++) sums[r][j] = all(-numbers[r]);
}

// As if the sums had begun so: less a number per row, and then times `factor`. A number that is large
// beside the sums has to be subtracted from all of it at once, or it takes their digits away.
EJ_INLINE void subtract(Sums& sums, const float* numbers, float factor = 1) {
  EJ_UNROLL for (int r = 0; r < ROWS; r++)
    EJ_UNROLL for (int j = 0; j < VECTORS; j++)
      sums[r][j] = (sums[r][j] - all(numbers[r])) * factor;
}
constexpr float NOTHING[ROWS] = {};

EJ_INLINE void load_sums(Sums& sums, const float* from, long stride) {
  EJ_UNROLL for (int r = 0; r < ROWS; r++)
    EJ_UNROLL for (int j = 0; j < VECTORS; j++) sums[r][j] = load(from + r * stride + j * LANES);
}

EJ_INLINE void store_sums(const Sums& sums, float* to, long stride) {
  EJ_UNROLL for (int r = 0; r < ROWS; r++)
    EJ_UNROLL for (int j = 0; j < VECTORS; j++) store(to + r * stride + j * LANES, sums[r][j]);
}

// sums += left * panel. Number (r, k) of the left matrix is at left[r * ROW + k * STEP].
template <long ROW, long STEP>
EJ_INLINE void multiply(Sums& sums, const float* left, const float* panel, long depth) {
  for (long k = 0; k < depth; k++) {
    vec line[VECTORS];
    EJ_UNROLL for (int j = 0; j < VECTORS; j++) line[j] = load(panel + j * LANES);
    EJ_UNROLL for (int r = 0; r < ROWS; r++) {
      vec number = all(left[r * ROW]);
      EJ_UNROLL for (int j = 0; j < VECTORS; j++) sums[r][j] += number * line[j];
    }
    left += STEP;
    panel += COLUMNS;
  }
}

EJ_INLINE void multiply_strip(Sums& sums, const float* strip, const float* panel, long depth) {
  multiply<1, ROWS>(sums, strip, panel, depth);
}

// A tile of scores, one row of queries after the other. The length of a row is a constant, so that
// products need no address arithmetic, and an odd number of cache lines, so that rows do not
// compete for the same places in the cache.
template <long KEYS>
struct Tile {
  static constexpr long MOST_KEYS = KEYS;
  static constexpr long STRIDE = KEYS + 16;
  static_assert(KEYS % 32 == 0 && KEYS % COLUMNS == 0);

  static EJ_INLINE void multiply_rows(Sums& sums, const float* tile, const float* panel,
                                      long depth) {
    multiply<STRIDE, 1>(sums, tile, panel, depth);
  }
  static EJ_INLINE void multiply_columns(Sums& sums, const float* tile, const float* panel,
                                         long depth) {
    multiply<1, STRIDE>(sums, tile, panel, depth);
  }
};

// --- layouts ------------------------------------------------------------------------------------

// Where the keys or the values of a sequence are if they lie in pages: key r in row r % size of page
// number table[r / size], and what it is multiplied by.
struct Paging {
  const int32_t* table = nullptr;  // null: they lie one after the other
  long size = 1, keys = 0;
  const float* scale = nullptr;  // of the first head, or null
  long scale_page = 0, scale_slot = 0;

  long slot(long r) const { return table[r / size] * size + r % size; }
  float factor(long r, long head) const {
    return scale ? scale[table[r / size] * scale_page + r % size * scale_slot + head] : 1;
  }
};

// The rows of one matrix among the arrays of a call: row r begins at number `at(r)`.
struct Rows {
  const void* data;
  Type type;
  long width;
  long first;         // where row 0 begins
  long query_stride;  // from row r to row r + group
  long group;         // rows of one query lie behind each other
  bool clean = false;               // zero instead of what is not finite
  const float* factors = nullptr;   // of each row, if not null; a row with 0 is zero, whatever it holds
  const Paging* paging = nullptr;   // if rows lie in pages
  long head = 0;                    // whose rows these are then

  long at(long r) const {
    if (paging) return first + paging->slot(r) * query_stride;
    return first + r / group * query_stride + r % group * width;
  }
  void read(float* to, long r, float factor = 1) const {
    fetch(r + 8);
    if (factors) factor *= factors[r];
    if (paging) factor *= paging->factor(r, head);
    if (factor == 0) {
      memset(to, 0, width * sizeof(float));
      return;
    }
    read_row(to, data, type, at(r), width, factor);
    if (clean) clean_row(to, width);
  }
  // Also of rows that do not exist: nothing is read.
  void fetch(long r) const {
    if (!paging || r < paging->keys) fetch_row(data, type, at(r), width);
  }
};

// to[d * stride + c] = from[c * width + d] for c < COUNT, d < width: a matrix of COUNT rows, turned.
// COUNT is a whole number of vectors, or less than one.
template <long COUNT>
EJ_INLINE void turn(float* to, long stride, const float* from, long width) {
  constexpr long USED = COUNT < LANES ? COUNT : LANES;
  long d = 0;
  // A vector that is not full is stored as if it were, and the next one overwrites the excess: all
  // but the very last.
  if (COUNT % LANES == 0 || COUNT < LANES)
    for (; d + LANES <= width - (COUNT < LANES); d += LANES)
      for (long c = 0; c < COUNT; c += LANES) {
        vec block[LANES];
        EJ_UNROLL for (int i = 0; i < LANES; i++)
          block[i] = i < USED ? load(from + (c + i) * width + d) : vec{};
        transpose(block);
        EJ_UNROLL for (int i = 0; i < LANES; i++) store(to + (d + i) * stride + c, block[i]);
      }
  for (; d < width; d++)
    for (long c = 0; c < COUNT; c++) to[d * stride + c] = from[c * width + d];
}

// Rows [begin, end), as the *columns* of panels: (end - begin) / COLUMNS panels of (width, COLUMNS).
// `lines` has room for COLUMNS rows.
inline void pack_transposed(float* panels, const Rows& rows, long begin, long end, float* lines) {
  const long width = rows.width;
  for (long k = begin; k < end; k += COLUMNS) {
    const long filled = least(COLUMNS, end - k);
    for (long c = 0; c < filled; c++) rows.read(lines + c * width, k + c);
    memset(lines + filled * width, 0, (COLUMNS - filled) * width * sizeof(float));
    turn<COLUMNS>(panels, COLUMNS, lines, width);
    panels += width * COLUMNS;
  }
}

// Rows [begin, end) as rows of panels, each `stride` numbers from the next; `line` has room for
// a row that is rounded up to whole panels.
inline void pack_panels(float* panels, long stride, const Rows& rows, long begin, long end,
                        float* line, float factor = 1) {
  const long padded = round_up(rows.width, COLUMNS);
  for (long d = rows.width; d < padded; d++) line[d] = 0;
  for (long r = begin; r < end; r++) {
    rows.read(line, r, factor);
    for (long d = 0; d < padded; d += COLUMNS)
      memcpy(panels + d / COLUMNS * stride + (r - begin) * COLUMNS, line + d,
             COLUMNS * sizeof(float));
  }
}

// Rows [begin, end) as strips of (width, ROWS), with zeros for the rows that fill the last one up;
// `lines` has room for ROWS rows.
inline void pack_strips(float* strips, const Rows& rows, long begin, long end, float* lines,
                        float factor = 1) {
  const long width = rows.width;
  for (long s = begin; s < end; s += ROWS) {
    const long filled = least(ROWS, end - s);
    for (long r = 0; r < filled; r++) rows.read(lines + r * width, s + r, factor);
    memset(lines + filled * width, 0, (ROWS - filled) * width * sizeof(float));
    turn<ROWS>(strips, ROWS, lines, width);
    strips += width * ROWS;
  }
}

}  // namespace ejkernel

#endif
