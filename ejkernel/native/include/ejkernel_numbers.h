// Rows of float32, bfloat16 and float16 numbers from and to float32.
#ifndef EJKERNEL_NUMBERS_H_
#define EJKERNEL_NUMBERS_H_

#include "ejkernel_ffi.h"
#include "ejkernel_simd.h"

namespace ejkernel {

EJ_INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

EJ_INLINE float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

EJ_INLINE float from_bfloat16(uint16_t x) { return from_bits(uint32_t(x) << 16); }

EJ_INLINE uint16_t to_bfloat16(float x) {
  uint32_t bits = bits_of(x);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  return x == x ? rounded : uint32_t(0x7fc0);
}

EJ_INLINE float from_float16(uint16_t x) {
  uint32_t magnitude = uint32_t(x & 0x7fff) << 13;
  // Multiplying by 2^112 moves the exponent's bias and makes numbers of the subnormal ones.
  float value = from_bits(magnitude) * from_bits(uint32_t(254 - 15) << 23);
  uint32_t bits = bits_of(value);
  bits = magnitude >= 0x0f800000 ? bits | 0x7f800000 : bits;  // infinity and NaN
  return from_bits(bits | uint32_t(x & 0x8000) << 16);
}

EJ_INLINE uint16_t to_float16(float x) {
  uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  uint32_t odd = (bits >> 13) & 1;
  uint32_t normal = (bits + 0xc8000fff + odd) >> 13;  // bias moved, to nearest, ties to even
  // Below 2^-14 the addition of 0.5 leaves the right subnormal number in the lowest bits.
  uint32_t subnormal = bits_of(from_bits(bits) + 0.5f) - 0x3f000000;
  uint32_t result = bits < 0x38800000 ? subnormal : normal;
  result = bits >= 0x47800000 ? 0x7c00 : result;
  result = bits > 0x7f800000 ? 0x7e00 : result;
  return uint16_t(result | sign);
}

inline bool is_floating(Type type) {
  return type == Type::float32 || type == Type::bfloat16 || type == Type::float16;
}

inline long bytes_of(Type type) { return type == Type::float32 ? 4 : 2; }

// Rows lie pages apart, where no processor looks ahead by itself.
EJ_INLINE void fetch_row(const void* from, Type type, long first, long length) {
  const char* line = static_cast<const char*>(from) + first * bytes_of(type);
  for (long i = 0; i < length * bytes_of(type); i += 64) __builtin_prefetch(line + i);
}

// `to[0 .. length)` = `factor` times numbers number `first` and following of `from`.
__attribute__((noinline)) inline void read_row(float* to, const void* from, Type type, long first, long length,
                     float factor = 1) {
  if (type == Type::float32) {
    const float* row = static_cast<const float*>(from) + first;
    for (long i = 0; i < length; i++) to[i] = factor * row[i];
    return;
  }
  const uint16_t* row = static_cast<const uint16_t*>(from) + first;
  if (type == Type::bfloat16)
    for (long i = 0; i < length; i++) to[i] = factor * from_bfloat16(row[i]);
  else
    for (long i = 0; i < length; i++) to[i] = factor * from_float16(row[i]);
}

__attribute__((noinline)) inline void write_row(void* to, Type type, long first, long length, const float* from,
                      float factor = 1) {
  if (type == Type::float32) {
    float* row = static_cast<float*>(to) + first;
    for (long i = 0; i < length; i++) row[i] = factor * from[i];
    return;
  }
  uint16_t* row = static_cast<uint16_t*>(to) + first;
  if (type == Type::bfloat16)
    for (long i = 0; i < length; i++) row[i] = to_bfloat16(factor * from[i]);
  else
    for (long i = 0; i < length; i++) row[i] = to_float16(factor * from[i]);
}

// Whether all numbers are finite.
inline bool is_finite_row(const float* row, long length) {
  uint32_t found = 0;
  for (long i = 0; i < length; i++) found |= (bits_of(row[i]) & 0x7f800000) == 0x7f800000;
  return !found;
}

// Zero instead of NaN and infinity: times a weight of zero those would be NaN.
inline void clean_row(float* row, long length) {
  for (long i = 0; i < length; i++) {
    const uint32_t bits = bits_of(row[i]);
    row[i] = from_bits((bits & 0x7f800000) == 0x7f800000 ? 0 : bits);
  }
}

}  // namespace ejkernel

#endif
