// Support code in front of every kernel that the CPU backend emits. No standard headers: they cost more compile time than the kernel.
typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;

// Storage types without arithmetic of their own.
enum bf16 : uint16_t {};
enum f8e4m3 : uint8_t {};
enum f8e5m2 : uint8_t {};

struct Program {
  int id[3];    // program id
  int grid[3];  // number of programs
};

// ---- runtime library (native/runtime.cpp), bound when the kernel is loaded

struct Runtime {
  void (*parallel_for)(void (*body)(const void*, int64_t, int64_t, char*), const void* args, int64_t programs, int threads,
                       int64_t arena_bytes);
  void (*poll)(unsigned* polls);
  int64_t (*clock_ns)();
};
extern "C" const Runtime* ttd_runtime;
const Runtime* ttd_runtime;
#define ttd_parallel_for ttd_runtime->parallel_for
#define ttd_clock_ns ttd_runtime->clock_ns

// ---- device assertions: a failing program stops, the launch returns the message

static const char* ttd_failure;
static inline const char* ttd_take_failure() { return __atomic_exchange_n(&ttd_failure, (const char*)nullptr, __ATOMIC_ACQ_REL); }
#ifdef TTD_ASSERTS
#define TTD_TRY try {
#define TTD_CATCH } catch (const char* message) { __atomic_store_n(&ttd_failure, message, __ATOMIC_RELEASE); }
#else
#define TTD_TRY
#define TTD_CATCH
#endif

// ---- conversions

template <class To, class From> static inline To ttd_bitcast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bitcast between types of different sizes");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

static inline float ttd_float(bf16 x) { return ttd_bitcast<float>(uint32_t(x) << 16); }
static inline float ttd_float(f8e5m2 x) { return float(ttd_bitcast<_Float16>(uint16_t(uint16_t(x) << 8))); }
static inline float ttd_float(f8e4m3 x) {
  const uint32_t sign = uint32_t(x >> 7) << 31, exponent = (x >> 3) & 15, mantissa = x & 7;
  if (exponent == 15 && mantissa == 7) return ttd_bitcast<float>(sign | 0x7fc00000u);
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * float(mantissa) * 0.001953125f;  // 2^-9
  return ttd_bitcast<float>(sign | ((exponent + 120) << 23) | (mantissa << 20));
}

// Round to nearest even; NaN stays NaN.
static inline bf16 ttd_bf16(float x) {
  const uint32_t bits = ttd_bitcast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return bf16((bits & 0x7fffffffu) > 0x7f800000u ? ((bits >> 16) | 0x40u) : rounded);
}
static inline f8e5m2 ttd_f8e5m2(float x) {
  const uint16_t bits = ttd_bitcast<uint16_t>(_Float16(x));
  if ((bits & 0x7fff) > 0x7c00) return f8e5m2((bits >> 8) | 2);
  return f8e5m2((bits + 0x7f + ((bits >> 8) & 1)) >> 8);
}
static inline f8e4m3 ttd_f8e4m3(float x) {
  const uint32_t bits = ttd_bitcast<uint32_t>(x), sign = (bits >> 24) & 0x80;
  const float magnitude = __builtin_fabsf(x);
  if (!(magnitude < 464.0f)) return f8e4m3(sign | (magnitude == magnitude ? 0x7e : 0x7f));  // saturates
  if (magnitude < 0.015625f) return f8e4m3(sign | uint32_t(__builtin_nearbyintf(magnitude * 512.0f)));
  const uint32_t m = bits & 0x7fffffffu, rounded = m + 0x7ffffu + ((m >> 20) & 1u);
  return f8e4m3(sign | (((rounded >> 20) - (120u << 3)) & 0x7f));
}

template <class To, class From> struct Cast {
  static inline To of(From x) { return To(x); }
};
template <class To> struct Cast<To, bf16> {
  static inline To of(bf16 x) { return To(ttd_float(x)); }
};
template <class To> struct Cast<To, f8e4m3> {
  static inline To of(f8e4m3 x) { return To(ttd_float(x)); }
};
template <class To> struct Cast<To, f8e5m2> {
  static inline To of(f8e5m2 x) { return To(ttd_float(x)); }
};
template <class T> struct Narrow;
template <> struct Narrow<bf16> {
  static inline bf16 of(float x) { return ttd_bf16(x); }
};
template <> struct Narrow<f8e4m3> {
  static inline f8e4m3 of(float x) { return ttd_f8e4m3(x); }
};
template <> struct Narrow<f8e5m2> {
  static inline f8e5m2 of(float x) { return ttd_f8e5m2(x); }
};
template <class T> struct Is { static const bool narrow = false; };
template <> struct Is<bf16> { static const bool narrow = true; };
template <> struct Is<f8e4m3> { static const bool narrow = true; };
template <> struct Is<f8e5m2> { static const bool narrow = true; };

template <class To, class From> static inline To ttd_cast(From x) {
  if constexpr (Is<To>::narrow)
    return Narrow<To>::of(Cast<float, From>::of(x));
  else
    return Cast<To, From>::of(x);
}
template <class To> static inline To ttd_truncate(float x) { return To(ttd_bitcast<uint32_t>(x) >> 16); }  // f32 -> bf16, towards zero

// ---- integer arithmetic. Division by zero and overflow give some value; they must not trap.

template <class T> static inline T ttd_div(T a, T b) {
  if (T(-1) < T(0) && b == T(-1)) return T(0 - (unsigned long long)(a));
  return b == 0 ? T(0) : T(a / b);
}
template <class T> static inline T ttd_rem(T a, T b) {
  if (T(-1) < T(0) && b == T(-1)) return T(0);
  return b == 0 ? T(0) : T(a % b);
}
template <class T> static inline T ttd_ceildiv(T a, T b) {
  const T q = ttd_div<T>(a, b), r = ttd_rem<T>(a, b);
  return q + T(r != 0 && ((r < 0) == (b < 0)));
}
template <class T> static inline T ttd_floordiv(T a, T b) {
  const T q = ttd_div<T>(a, b), r = ttd_rem<T>(a, b);
  return q - T(r != 0 && ((r < 0) != (b < 0)));
}
template <class T> static inline T ttd_shl(T a, T b) { return uint64_t(b) < 8 * sizeof(T) ? T(a << b) : T(0); }
template <class T> static inline T ttd_shr(T a, T b) { return uint64_t(b) < 8 * sizeof(T) ? T(a >> b) : T(a < 0 ? -1 : 0); }
template <class T> static inline T ttd_max(T a, T b) { return a > b ? a : b; }
template <class T> static inline T ttd_min(T a, T b) { return a < b ? a : b; }
template <class T> static inline T ttd_abs(T a) { return a < 0 ? T(-a) : a; }
template <class T> static inline T ttd_mulhi(T a, T b) {
  if constexpr (sizeof(T) == 8)
    return T(((unsigned __int128)(a)*b) >> 64);
  else
    return T((uint64_t(a) * b) >> (8 * sizeof(T)));
}
static inline int32_t ttd_umulhi(int32_t a, int32_t b) { return int32_t(ttd_mulhi<uint32_t>(uint32_t(a), uint32_t(b))); }
static inline int ttd_popcount(int64_t a) { return __builtin_popcountll(uint64_t(a)); }
static inline int ttd_popcount(int32_t a) { return __builtin_popcount(uint32_t(a)); }
static inline int ttd_clz(int32_t a) { return a ? __builtin_clz(uint32_t(a)) : 32; }
static inline int ttd_clz(int64_t a) { return a ? __builtin_clzll(uint64_t(a)) : 64; }
static inline int ttd_ffs(int32_t a) { return __builtin_ffs(a); }
static inline int ttd_ffs(int64_t a) { return __builtin_ffsll(a); }

// ---- floating point, for float and double

#define TTD_MATH1(name)                                                         \
  static inline float ttd_##name(float x) { return __builtin_##name##f(x); }    \
  static inline double ttd_##name(double x) { return __builtin_##name(x); }
#define TTD_MATH2(name)                                                                      \
  static inline float ttd_##name(float x, float y) { return __builtin_##name##f(x, y); }     \
  static inline double ttd_##name(double x, double y) { return __builtin_##name(x, y); }
TTD_MATH1(exp) TTD_MATH1(exp2) TTD_MATH1(expm1) TTD_MATH1(log) TTD_MATH1(log2) TTD_MATH1(log10) TTD_MATH1(log1p)
TTD_MATH1(sqrt) TTD_MATH1(sin) TTD_MATH1(cos) TTD_MATH1(tan) TTD_MATH1(asin) TTD_MATH1(acos) TTD_MATH1(atan) TTD_MATH1(sinh)
TTD_MATH1(cosh) TTD_MATH1(tanh) TTD_MATH1(erf) TTD_MATH1(erfc) TTD_MATH1(floor) TTD_MATH1(ceil) TTD_MATH1(trunc) TTD_MATH1(round)
TTD_MATH1(cbrt) TTD_MATH1(fabs)
TTD_MATH2(fmod) TTD_MATH2(copysign) TTD_MATH2(pow) TTD_MATH2(atan2)
template <class T> static inline T ttd_roundeven(T x) { return sizeof(T) == 4 ? T(__builtin_nearbyintf(float(x))) : T(__builtin_nearbyint(x)); }
template <class T> static inline T ttd_rsqrt(T x) { return T(1) / ttd_sqrt(x); }
template <class T> static inline T ttd_fma(T a, T b, T c) { return sizeof(T) == 4 ? T(__builtin_fmaf(a, b, c)) : T(__builtin_fma(a, b, c)); }
template <class T> static inline T ttd_divide(T a, T b) { return a / b; }
template <class T> static inline T ttd_sigmoid(T x) { return T(1) / (T(1) + ttd_exp(-x)); }
template <class T> static inline T ttd_powi(T x, int n) { return ttd_pow(x, T(n)); }
template <class T> static inline T ttd_normcdf(T x) { return T(0.5) * ttd_erfc(-x * T(0.70710678118654752440)); }
template <class T> static inline T ttd_sinpi(T x) { return T(__builtin_sin(double(x) * 3.14159265358979323846)); }
template <class T> static inline T ttd_cospi(T x) { return T(__builtin_cos(double(x) * 3.14159265358979323846)); }
template <class T> static inline T ttd_maximum(T a, T b) { return a != a ? a : b != b ? b : a > b ? a : b; }  // NaN wins
template <class T> static inline T ttd_minimum(T a, T b) { return a != a ? a : b != b ? b : a < b ? a : b; }
template <class T> static inline T ttd_maxnum(T a, T b) { return a > b || b != b ? a : b; }  // NaN loses
template <class T> static inline T ttd_minnum(T a, T b) { return a < b || b != b ? a : b; }
template <class T> static inline T ttd_clamp(T x, T low, T high) { return ttd_minnum(high, ttd_maxnum(low, x)); }
template <class T> static inline int ttd_isnan(T x) { return x != x; }
template <class T> static inline int ttd_isinf(T x) { return ttd_fabs(x) == T(__builtin_inf()); }
template <class T> static inline int ttd_isfinite(T x) { return ttd_fabs(x) < T(__builtin_inf()); }
template <class T> static inline int ttd_signbit(T x) { return __builtin_signbit(x); }

// ---- atomics: really atomic between processes too, whatever the element type

template <int bytes> struct Word;
template <> struct Word<1> { typedef uint8_t type; };
template <> struct Word<2> { typedef uint16_t type; };
template <> struct Word<4> { typedef uint32_t type; };
template <> struct Word<8> { typedef uint64_t type; };

// Compare and swap; returns the old value.
template <class T> static inline T ttd_atomic_cas(T* pointer, T expected, T desired, int order) {
  typedef typename Word<sizeof(T)>::type W;
  W old = ttd_bitcast<W>(expected);
  const W value = ttd_bitcast<W>(desired);
  const int failure = order == __ATOMIC_RELEASE ? __ATOMIC_RELAXED : order == __ATOMIC_ACQ_REL ? __ATOMIC_ACQUIRE : order;
  __atomic_compare_exchange_n((W*)pointer, &old, value, false, order, failure);
  return ttd_bitcast<T>(old);
}
// Replaces x by f(x); returns the old value.
template <class T, class F> static inline T ttd_atomic_update(T* pointer, F f, int order) {
  typedef typename Word<sizeof(T)>::type W;
  W old = __atomic_load_n((W*)pointer, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n((W*)pointer, &old, ttd_bitcast<W>(f(ttd_bitcast<T>(old))), false, order, __ATOMIC_RELAXED)) {
  }
  return ttd_bitcast<T>(old);
}
template <class T> static inline T ttd_atomic_exchange(T* pointer, T value, int order) {
  typedef typename Word<sizeof(T)>::type W;
  return ttd_bitcast<T>(__atomic_exchange_n((W*)pointer, ttd_bitcast<W>(value), order));
}

// ---- matrix product: c[M][N] += a[M][K] b[K][N], row-major

#if defined(__AVX512F__)
enum { TTD_LANES = 16, TTD_ROWS = 8, TTD_COLUMNS = 2 };
#elif defined(__AVX2__)
enum { TTD_LANES = 8, TTD_ROWS = 4, TTD_COLUMNS = 2 };
#else
enum { TTD_LANES = 4, TTD_ROWS = 4, TTD_COLUMNS = 2 };
#endif
typedef float Lanes __attribute__((vector_size(TTD_LANES * 4), aligned(4), may_alias));

template <int N, int K, int ROWS, int COLUMNS>
static inline void ttd_dot_tile(const float* __restrict a, const float* __restrict b, float* __restrict c) {
  // From zero, and into c at the end: a chain of K additions for each block, not one over the whole depth of the matmul, whose
  // rounding would grow with it.
  Lanes sum[ROWS][COLUMNS];
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < COLUMNS; ++j) sum[i][j] = Lanes{};
  for (int k = 0; k < K; ++k) {
    Lanes row[COLUMNS];
    for (int j = 0; j < COLUMNS; ++j) row[j] = *(const Lanes*)(b + k * N + j * TTD_LANES);
    for (int i = 0; i < ROWS; ++i)
      for (int j = 0; j < COLUMNS; ++j) sum[i][j] += row[j] * a[i * K + k];
  }
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < COLUMNS; ++j) *(Lanes*)(c + i * N + j * TTD_LANES) += sum[i][j];
}

// Any type and shape.
template <int M, int N, int K, class T> static void ttd_dot_plain(const T* __restrict a, const T* __restrict b, T* __restrict c) {
  for (int i = 0; i < M; ++i)
    for (int k = 0; k < K; ++k) {
      const T x = a[i * K + k];
      for (int j = 0; j < N; ++j) c[i * N + j] += x * b[k * N + j];
    }
}

// float, register-blocked where the shape divides into tiles.
template <int M, int N, int K>
static __attribute__((noinline)) void ttd_dot(const float* __restrict a, const float* __restrict b, float* __restrict c) {
  if constexpr (N % TTD_LANES == 0) {
    constexpr int COLUMNS = N % (TTD_LANES * TTD_COLUMNS) == 0 ? int(TTD_COLUMNS) : 1;
    constexpr int ROWS = M % TTD_ROWS == 0 ? int(TTD_ROWS) : M % 4 == 0 ? 4 : 1;
    for (int j = 0; j < N; j += TTD_LANES * COLUMNS)
      for (int i = 0; i < M; i += ROWS) ttd_dot_tile<N, K, ROWS, COLUMNS>(a + i * K, b + j, c + i * N + j);
  } else {
    ttd_dot_plain<M, N, K, float>(a, b, c);
  }
}
