// Rows of numbers from and to float32: of floating types of 8 to 32 bits, and of int8.
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

// XLA's threads take subnormal numbers for zero: those of short types are made of integers.
EJ_INLINE float from_float16(uint16_t x) {
  const uint32_t magnitude = x & 0x7fff;
  uint32_t bits = (magnitude << 13) + (uint32_t(127 - 15) << 23);
  bits = magnitude >= 0x7c00 ? bits | 0x7f800000 : bits;  // infinity and NaN
  bits = magnitude < 0x400 ? bits_of(float(int32_t(magnitude)) * 0x1p-24f) : bits;
  return from_bits(bits | uint32_t(x & 0x8000) << 16);
}

// Numbers of 8 bits as JAX has them: e4m3fn without infinities, e5m2 as the upper half of a float16.
EJ_INLINE float from_e4m3(uint8_t x) {
  const uint32_t magnitude = x & 0x7f;
  uint32_t bits = (magnitude << 20) + (uint32_t(127 - 7) << 23);
  bits = magnitude == 0x7f ? 0x7fc00000 : bits;
  bits = magnitude < 8 ? bits_of(float(int32_t(magnitude)) * 0x1p-9f) : bits;
  return from_bits(bits | uint32_t(x & 0x80) << 24);
}

EJ_INLINE float from_e5m2(uint8_t x) { return from_float16(uint16_t(x << 8)); }

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

// What may be read as a row of floating numbers.
inline bool is_readable(Type type) {
  return is_floating(type) || type == Type::int8 || type == Type::float8_e4m3 ||
         type == Type::float8_e5m2;
}

inline long bytes_of(Type type) {
  return type == Type::float32 ? 4 : type == Type::bfloat16 || type == Type::float16 ? 2 : 1;
}

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
  if (bytes_of(type) == 1) {
    const uint8_t* row = static_cast<const uint8_t*>(from) + first;
    if (type == Type::int8)
      for (long i = 0; i < length; i++) to[i] = factor * float(int8_t(row[i]));
    else if (type == Type::float8_e4m3)
      for (long i = 0; i < length; i++) to[i] = factor * from_e4m3(row[i]);
    else
      for (long i = 0; i < length; i++) to[i] = factor * from_e5m2(row[i]);
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
