// Vectors as GCC and Clang know them: the compiler maps them to whatever the processor has.
#ifndef EJKERNEL_SIMD_H_
#define EJKERNEL_SIMD_H_

#include <stdint.h>
#include <string.h>

#ifdef __clang__
#define EJ_UNROLL _Pragma("unroll")
#else
#define EJ_UNROLL _Pragma("GCC unroll 16")
#endif
#define EJ_INLINE inline __attribute__((always_inline))

namespace ejkernel {

// The widest aligned type is the widest vector: 16, 32 or 64 bytes.
constexpr int LANES = __BIGGEST_ALIGNMENT__ / int(sizeof(float));

#if defined(__AVX512F__) || defined(__aarch64__) || defined(__powerpc64__) || defined(__riscv)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif

typedef float vec __attribute__((vector_size(sizeof(float) * LANES)));
typedef int32_t ivec __attribute__((vector_size(sizeof(int32_t) * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));

constexpr float INFINITE = __builtin_inff();
constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LN_2 = 0.693147180559945309f;

EJ_INLINE vec load(const float* from) {
  vec value;
  memcpy(&value, from, sizeof value);
  return value;
}

EJ_INLINE void store(float* to, vec value) { memcpy(to, &value, sizeof value); }

// `x - 0` is x, -0 included, so the subtraction disappears; `x + 0` would have to be computed.
EJ_INLINE vec all(float value) { return value - vec{}; }
EJ_INLINE ivec all(int32_t value) { return value - ivec{}; }

EJ_INLINE vec select(ivec mask, vec yes, vec no) {
  return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask));
}

// b where one of them is NaN, as the processors' own instruction has it.
EJ_INLINE vec larger(vec a, vec b) { return a > b ? a : b; }

EJ_INLINE float largest(vec value) {
  float found = value[0];
  EJ_UNROLL for (int i = 1; i < LANES; i++) found = value[i] > found ? value[i] : found;
  return found;
}

EJ_INLINE float sum(vec value) {
  float total = value[0];
  EJ_UNROLL for (int i = 1; i < LANES; i++) total += value[i];
  return total;
}

EJ_INLINE ivec counting() {
  ivec value;
  EJ_UNROLL for (int i = 0; i < LANES; i++) value[i] = i;
  return value;
}

// Bytes as integers. GCC takes vectors of less than 16 bytes apart, number by number, unless it is told
// the instruction.
EJ_INLINE ivec widen(const int8_t* from) {
#if defined(__AVX512F__) && !defined(__clang__)
  typedef char chars __attribute__((vector_size(16)));
  chars x;
  memcpy(&x, from, sizeof x);
  return (ivec)__builtin_ia32_pmovsxbd512_mask(x, ivec{}, -1);
#elif defined(__AVX2__) && !defined(__clang__)
  typedef char chars __attribute__((vector_size(16)));
  typedef long long pair __attribute__((vector_size(16)));
  long long x;
  memcpy(&x, from, sizeof x);
  return (ivec)__builtin_ia32_pmovsxbd256((chars)pair{x, 0});
#else
  bytes x;
  memcpy(&x, from, sizeof x);
  return __builtin_convertvector(x, ivec);
#endif
}

// The first and the second halves of a and b, their numbers alternating.
template <int... I>
struct Zip {
#ifdef __clang__
  static EJ_INLINE vec first(vec a, vec b) {
    return __builtin_shufflevector(a, b, (I / 2 + I % 2 * LANES)...);
  }
  static EJ_INLINE vec second(vec a, vec b) {
    return __builtin_shufflevector(a, b, (LANES / 2 + I / 2 + I % 2 * LANES)...);
  }
#else
  static EJ_INLINE vec first(vec a, vec b) {
    return __builtin_shuffle(a, b, ivec{(I / 2 + I % 2 * LANES)...});
  }
  static EJ_INLINE vec second(vec a, vec b) {
    return __builtin_shuffle(a, b, ivec{(LANES / 2 + I / 2 + I % 2 * LANES)...});
  }
#endif
};
template <int N, int... I>
struct ZipOf : ZipOf<N - 1, N - 1, I...> {};
template <int... I>
struct ZipOf<0, I...> : Zip<I...> {};

// Number j of vector i becomes number i of vector j.
EJ_INLINE void transpose(vec (&x)[LANES]) {
  typedef ZipOf<LANES> zip;
  EJ_UNROLL for (int step = 1; step < LANES; step *= 2) {
    vec y[LANES];
    EJ_UNROLL for (int i = 0; i < LANES / 2; i++) {
      y[2 * i] = zip::first(x[i], x[i + LANES / 2]);
      y[2 * i + 1] = zip::second(x[i], x[i + LANES / 2]);
    }
    EJ_UNROLL for (int i = 0; i < LANES; i++) x[i] = y[i];
  }
}

// The sum of vector i becomes number i: what is left of `transpose` if halves are added on the way.
EJ_INLINE vec sums_of(vec (&x)[LANES]) {
  typedef ZipOf<LANES> zip;
  EJ_UNROLL for (int half = LANES / 2; half > 0; half /= 2)
    EJ_UNROLL for (int i = 0; i < half; i++)
      x[i] = zip::first(x[i], x[i + half]) + zip::second(x[i], x[i + half]);
  return x[0];
}

// 2^x for x < 127.5, relative error 1.7e-7, exactly 1 for 0; exactly zero below -126.5, NaN for NaN.
// What it gives for larger numbers has no meaning.
//
// N vectors take every step together: one alone would wait for each of its steps to end, and a
// processor does not look far enough ahead to fill the time with the next one.
template <int N>
EJ_INLINE void exp2(vec (&x)[N]) {
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the lowest bits; 127 more is the
  // bias of the exponent, so a shift turns the bits into 2^integer.
  const float magic = 12582912.0f + 127.0f;
  vec power[N], p[N];
  EJ_UNROLL for (int i = 0; i < N; i++) x[i] = larger(all(-127.0f), x[i]);  // so NaN stays NaN
  EJ_UNROLL for (int i = 0; i < N; i++) power[i] = x[i] + magic;
  EJ_UNROLL for (int i = 0; i < N; i++) x[i] -= power[i] - magic;
  // Minimax on [-0.5, 0.5] among those that are 1 at 0: a key that has all the weight has a weight of
  // one.
  EJ_UNROLL for (int i = 0; i < N; i++)
    p[i] = x[i] * 0.001326472731307149f + 0.009671512991189957f;
  EJ_UNROLL for (int i = 0; i < N; i++) p[i] = p[i] * x[i] + 0.05550733581185341f;
  EJ_UNROLL for (int i = 0; i < N; i++) p[i] = p[i] * x[i] + 0.24022242426872253f;
  EJ_UNROLL for (int i = 0; i < N; i++) p[i] = p[i] * x[i] + 0.6931470036506653f;
  EJ_UNROLL for (int i = 0; i < N; i++) p[i] = p[i] * x[i] + 1.0f;
  EJ_UNROLL for (int i = 0; i < N; i++) x[i] = p[i] * (vec)((ivec)power[i] << 23);
}

EJ_INLINE vec exp2(vec x) {
  vec one[1] = {x};
  exp2(one);
  return one[0];
}

// tanh as a ratio of polynomials, exact to about 3 units in the last place.
EJ_INLINE vec tanh(vec x) {
  const float limit = 7.90531110763549805f;
  x = x > all(limit) ? all(limit) : x;
  x = x < all(-limit) ? all(-limit) : x;
  vec s = x * x;
  vec p = s * -2.76076847742355e-16f + 2.00018790482477e-13f;
  p = p * s + -8.60467152213735e-11f;
  p = p * s + 5.12229709037114e-08f;
  p = p * s + 1.48572235717979e-05f;
  p = p * s + 6.37261928875436e-04f;
  p = p * s + 4.89352455891786e-03f;
  vec q = s * 1.19825839466702e-06f + 1.18534705686654e-04f;
  q = q * s + 2.26843463243900e-03f;
  q = q * s + 4.89352518554385e-03f;
  return x * p / q;
}

}  // namespace ejkernel

#endif
