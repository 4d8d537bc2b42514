// CUDA C++ text on the CPU: CUDA's built-in names, and the functions of the emitter's prelude that are inline PTX on a GPU.
//
// Matrix fragments are laid out as the PTX ISA says of ldmatrix and mma.m16n8k16. Asynchronous copies are made at
// once under some schedules and only when they are waited for under others: a wait that is missing leaves stale bytes.
#pragma once
#include "runtime.hpp"

#define TILE_LINE int line = __builtin_LINE()
#define __global__ static
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define TK_DYNAMIC(name, align)                                                                                        \
  unsigned char *const name = static_cast<unsigned char *>(shim::dynamic_shared(#name, align))

#define threadIdx (tile_thread())
#define blockIdx (shim::group)
#define gridDim (shim::groups)
#define blockDim (tile_block())
constexpr int warpSize = 32;
inline shim::Place tile_thread() { return {shim::current->index, 0, 0}; }
inline shim::Place tile_block() { return {shim::threads, 1, 1}; }

#define TILE_VECTOR(type, base)                                                                                        \
  struct alignas(2 * sizeof(base)) type##2 {                                                                           \
    base x, y;                                                                                                         \
  };                                                                                                                   \
  struct alignas(4 * sizeof(base)) type##4 {                                                                           \
    base x, y, z, w;                                                                                                   \
  };                                                                                                                   \
  inline type##2 make_##type##2(base x, base y) { return {x, y}; }                                                     \
  inline type##4 make_##type##4(base x, base y, base z, base w) { return {x, y, z, w}; }
TILE_VECTOR(float, float)
TILE_VECTOR(int, int)
TILE_VECTOR(uint, unsigned)
#undef TILE_VECTOR

extern "C" {
void *memcpy(void *, const void *, std::size_t) noexcept;
float expf(float) noexcept;
float exp2f(float) noexcept;
float logf(float) noexcept;
float log2f(float) noexcept;
float sinf(float) noexcept;
float cosf(float) noexcept;
float tanhf(float) noexcept;
float sqrtf(float) noexcept;
float floorf(float) noexcept;
float ceilf(float) noexcept;
float rintf(float) noexcept;
float fabsf(float) noexcept;
float fmaf(float, float, float) noexcept;
}
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float min(float a, float b) { return __builtin_fminf(a, b); }
static inline float max(float a, float b) { return __builtin_fmaxf(a, b); }
static inline int min(int a, int b) { return b < a ? b : a; }
static inline int max(int a, int b) { return a < b ? b : a; }
static inline unsigned min(unsigned a, unsigned b) { return b < a ? b : a; }
static inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(std::uint64_t(a) * b >> 32); }
static inline float __uint_as_float(unsigned x) { return shim::bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return shim::bits<unsigned>(x); }

// ------------------------------------------------------------------------------------------------------ synchronisation

static inline void __syncthreads(TILE_LINE) { shim::wait(shim::State::Threadgroup, "__syncthreads", line); }
// All 32 lanes take part in everything below: any other mask is a mistake in the text.
static inline void tile_all(unsigned mask, const char *what, int line) {
  if (mask != ~0u) shim::fail("%s (line %d): the mask is %#x, not all lanes", what, line, mask);
}
static inline void __syncwarp(unsigned mask = ~0u, TILE_LINE) {
  tile_all(mask, "__syncwarp", line);
  shim::wait(shim::State::Simd, "__syncwarp", line);
}
static inline void __threadfence() {}
static inline void __threadfence_block() {}

template <class T> inline T __shfl_sync(unsigned mask, T x, int lane, int = 32, TILE_LINE) {
  tile_all(mask, "__shfl_sync", line);
  return shim::exchange(x, "__shfl_sync", line)[unsigned(lane)];
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T x, int bits, int = 32, TILE_LINE) {
  tile_all(mask, "__shfl_xor_sync", line);
  return shim::exchange(x, "__shfl_xor_sync", line)[shim::current->lane ^ unsigned(bits)];
}
// Lanes that would look past the end get their own value back.
template <class T> inline T __shfl_up_sync(unsigned mask, T x, unsigned by, int = 32, TILE_LINE) {
  tile_all(mask, "__shfl_up_sync", line);
  auto lanes = shim::exchange(x, "__shfl_up_sync", line);
  return shim::current->lane >= by ? lanes[shim::current->lane - by] : x;
}
template <class T> inline T __shfl_down_sync(unsigned mask, T x, unsigned by, int = 32, TILE_LINE) {
  tile_all(mask, "__shfl_down_sync", line);
  auto lanes = shim::exchange(x, "__shfl_down_sync", line);
  return shim::current->lane + by < shim::LANES ? lanes[shim::current->lane + by] : x;
}
static inline unsigned __ballot_sync(unsigned mask, int x, TILE_LINE) {
  tile_all(mask, "__ballot_sync", line);
  auto lanes = shim::exchange(x != 0, "__ballot_sync", line);
  unsigned bits = 0;
  for (unsigned i = 0; i < shim::LANES; i++) bits |= unsigned(lanes[i]) << i;
  return bits;
}
static inline int __any_sync(unsigned mask, int x, TILE_LINE) { return __ballot_sync(mask, x, line) != 0; }
static inline int __all_sync(unsigned mask, int x, TILE_LINE) { return __ballot_sync(mask, x, line) == ~0u; }

// Fibres are suspended at barriers and exchanges only, so plain operations are atomic.
template <class T> inline T tile_swap(T *p, T to) {
  T old = *p;
  *p = to;
  return old;
}
static inline float atomicAdd(float *p, float x) { return tile_swap(p, *p + x); }
static inline unsigned atomicAdd(unsigned *p, unsigned x) { return tile_swap(p, *p + x); }
static inline int atomicAdd(int *p, int x) { return tile_swap(p, int(unsigned(*p) + unsigned(x))); }
static inline unsigned atomicMin(unsigned *p, unsigned x) { return tile_swap(p, min(*p, x)); }
static inline int atomicMin(int *p, int x) { return tile_swap(p, min(*p, x)); }
static inline unsigned atomicMax(unsigned *p, unsigned x) { return tile_swap(p, max(*p, x)); }
static inline int atomicMax(int *p, int x) { return tile_swap(p, max(*p, x)); }
static inline unsigned atomicExch(unsigned *p, unsigned x) { return tile_swap(p, x); }
static inline int atomicExch(int *p, int x) { return tile_swap(p, x); }
static inline float atomicExch(float *p, float x) { return tile_swap(p, x); }

// ------------------------------------------------------------------------------------------------------ the prelude's own

static inline unsigned short tk_f16_from(float x) { return shim::to_f16(x); }
static inline float tk_f16_to(unsigned short x) { return shim::from_f16(x); }
static inline unsigned short tk_bf16_from(float x) { return shim::to_bf16(x); }
static inline unsigned tk_f16x2_from(float low, float high) {
  return shim::to_f16(low) | unsigned(shim::to_f16(high)) << 16;
}
static inline unsigned tk_bf16x2_from(float low, float high) {
  return shim::to_bf16(low) | unsigned(shim::to_bf16(high)) << 16;
}
// cvt.rzi saturates and turns NaN into zero.
static inline int tk_i32(float x) {
  if (x >= 0x1p31f) return 0x7FFFFFFF;
  if (x < -0x1p31f) return int(0x80000000u);
  return x == x ? int(x) : 0;
}
static inline unsigned tk_u32(float x) {
  if (x >= 0x1p32f) return ~0u;
  return x > 0.0f ? unsigned(x) : 0;
}
static inline int tk_dot4(unsigned a, unsigned b, int acc) {
  for (int i = 0; i < 32; i += 8) {
    int product = static_cast<signed char>(a >> i) * static_cast<signed char>(b >> i);
    acc = int(unsigned(acc) + unsigned(product));
  }
  return acc;
}
// Products of f16 are exact in double, and so are most sums: what is rounded twice is too small to matter.
static inline unsigned tk_fma_f16x2(unsigned a, unsigned b, unsigned c) {
  auto half_of = [](unsigned word, int i) { return double(shim::from_f16(std::uint16_t(word >> 16 * i))); };
  unsigned y = 0;
  for (int i = 0; i < 2; i++) y |= unsigned(shim::to_f16(float(half_of(a, i) * half_of(b, i) + half_of(c, i)))) << 16 * i;
  return y;
}
static inline unsigned tk_bytes(unsigned a, unsigned b, unsigned by) {
  unsigned y = 0;
  for (int i = 0; i < 4; i++) {
    unsigned digit = by >> (4 * i), at = 8 * (digit & 3);
    unsigned byte = ((digit & 4 ? b : a) >> at) & 255;
    if (digit & 8) byte = byte & 128 ? 255 : 0;
    y |= byte << (8 * i);
  }
  return y;
}
template <class T> inline T tk_stream(const T *p) { return *p; }
template <class T> inline T tk_coherent(const T *p) { return *p; }
static inline void tk_grid_trigger() {}
static inline void tk_grid_wait() {}

static inline void tile_aligned(const void *p, unsigned bytes, const char *what, int line) {
  if (reinterpret_cast<std::uintptr_t>(p) % bytes)
    shim::fail("%s (line %d): the address is no multiple of %u", what, line, bytes);
}
static inline void tile_finish(const shim::Copy &copy) {
  if (copy.from) __builtin_memcpy(copy.to, copy.from, copy.bytes);
  else __builtin_memset(copy.to, 0, copy.bytes);
}
template <unsigned bytes> inline void tk_copy_async(void *to, const void *from, bool keep, TILE_LINE) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  tile_aligned(to, bytes, "cp.async to", line);
  if (keep) tile_aligned(from, bytes, "cp.async from", line);
  shim::Fibre &f = *shim::current;
  shim::Copy copy = {to, keep ? from : nullptr, bytes, f.batches};
  if (shim::copies_are_eager) return tile_finish(copy);
  if (f.copies == sizeof f.flight / sizeof *f.flight) shim::fail("cp.async (line %d): too many copies in flight", line);
  f.flight[f.copies++] = copy;
}
static inline void tk_copy_commit() { shim::current->batches++; }
// Finishes the copies of all batches but the `pending` latest. Copies that were never committed belong to none.
template <int pending> inline void tk_copy_wait() {
  shim::Fibre &f = *shim::current;
  unsigned kept = 0;
  for (unsigned i = 0; i < f.copies; i++) {
    if (f.flight[i].batch + unsigned(pending) < f.batches) tile_finish(f.flight[i]);
    else f.flight[kept++] = f.flight[i];
  }
  f.copies = kept;
}

// Four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8, and receives of every matrix
// the two elements of row l / 4 from column 2 (l % 4) on; transposed, those of column l / 4.
static inline void tile_ldmatrix(unsigned (&to)[4], const void *row, bool transposed, int line) {
  tile_aligned(row, 16, "ldmatrix", line);
  struct Row {
    std::uint16_t element[8];
  } mine;
  __builtin_memcpy(&mine, row, sizeof mine);
  auto rows = shim::exchange(mine, "ldmatrix", line);
  unsigned g = shim::current->lane / 4, t = shim::current->lane % 4 * 2;
  for (unsigned m = 0; m < 4; m++) {
    auto at = [&](unsigned r, unsigned c) { return unsigned(rows[8 * m + r].element[c]); };
    to[m] = transposed ? at(t, g) | at(t + 1, g) << 16 : at(g, t) | at(g, t + 1) << 16;
  }
}
static inline void tk_ldmatrix(unsigned (&to)[4], const void *row, TILE_LINE) { tile_ldmatrix(to, row, false, line); }
static inline void tk_ldmatrix_trans(unsigned (&to)[4], const void *row, TILE_LINE) {
  tile_ldmatrix(to, row, true, line);
}

// d += a b. With g = lane / 4 and t = 2 (lane % 4): a's words are (g, t), (g + 8, t), (g, t + 8), (g + 8, t + 8), each with its
// right neighbour; b's are (t, g), (t + 8, g), each with the one below; d's elements (g, t), (g, t + 1), (g + 8, t), (g + 8, t + 1).
template <float (*number)(std::uint16_t)>
inline void tile_mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], int line) {
  struct Words {
    unsigned a[4], b[2];
  } mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  auto lanes = shim::exchange(mine, "mma", line);
  unsigned g = shim::current->lane / 4, t = shim::current->lane % 4 * 2;
  auto half_of = [](unsigned word, unsigned k) { return number(std::uint16_t(k % 2 ? word >> 16 : word)); };
  for (unsigned k = 0; k < 16; k++) {
    unsigned within = k % 8 / 2, upper = k / 8;
    for (unsigned i = 0; i < 4; i++) {
      unsigned row = i / 2, column = t + i % 2;
      float left = half_of(lanes[g * 4 + within].a[row + 2 * upper], k);
      float right = half_of(lanes[column * 4 + within].b[upper], k);
      d[i] += left * right;
    }
  }
}
static inline void tk_mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], TILE_LINE) {
  tile_mma<shim::from_f16>(d, a, b, line);
}
static inline void tk_mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], TILE_LINE) {
  tile_mma<shim::from_bf16>(d, a, b, line);
}

// Products of warpgroups. This thread's part of one is computed when it begins under some schedules, under others when it is
// waited for: a wait that is missing leaves stale sums, operands that are overwritten before it give wrong ones. The fences
// order what a CPU has in order: whether they are missing, the interpreter says.
static inline void tk_async_fence() {}
static inline void tk_wgmma_fence(TILE_LINE) { shim::wait(shim::State::Simd, "wgmma.fence", line); }
static inline void tk_wgmma_commit() { shim::current->product_batches++; }
template <int pending> inline void tk_wgmma_wait(TILE_LINE) {
  shim::wait(shim::State::Simd, "wgmma.wait_group", line);
  shim::Fibre &f = *shim::current;
  unsigned kept = 0;
  for (unsigned i = 0; i < f.products; i++) {
    if (f.product[i].batch + unsigned(pending) < f.product_batches) f.product[i].run(f.product[i]);
    else f.product[kept++] = f.product[i];
  }
  f.products = kept;
}

// Rows of 128 bytes whose 16-byte units have changed places: the 128-byte swizzling mode, K-major. A warp has 16 rows of the
// sums, laid out as those of mma.m16n8k16, eight columns after eight.
template <float (*number)(std::uint16_t)> inline void tile_product(const shim::Product &p) {
  auto at = [](const std::uint16_t *block, unsigned row, unsigned k) {
    return number(block[row * 64 + ((k / 8) ^ (row % 8)) * 8 + k % 8]);
  };
  unsigned lane = shim::current->lane, warp = shim::current->simd % 4;
  for (unsigned i = 0; i < 8 * p.tiles; i++) {
    unsigned row = warp * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    float sum = p.sums[i];
    for (unsigned k = 0; k < 64; k++) sum += (p.a ? at(p.a, row, k) : number(p.held[i / 2 % 2][k])) * at(p.b, column, k);
    p.sums[i] = sum;
  }
}
inline void tile_begin(const shim::Product &product, int line) {
  shim::Fibre &f = *shim::current;
  if (shim::copies_are_eager) return product.run(product);
  if (f.products == sizeof f.product / sizeof *f.product) shim::fail("wgmma (line %d): too many products under way", line);
  f.product[f.products++] = product;
}
template <float (*number)(std::uint16_t)>
inline void tile_wgmma(float *sums, unsigned tiles, const void *a, const void *b, int line) {
  tile_aligned(a, 1024, "wgmma", line);
  tile_aligned(b, 1024, "wgmma", line);
  shim::wait(shim::State::Simd, "wgmma", line);
  auto words = [](const void *p) { return static_cast<const std::uint16_t *>(p); };
  tile_begin({tile_product<number>, sums, words(a), words(b), tiles, shim::current->product_batches, {}}, line);
}
// The left side as four operands of mma.m16n8k16, whose words are those of four lanes.
struct tile_operands {
  unsigned word[4][4];
};
template <float (*number)(std::uint16_t)>
inline void tile_wgmma_of(float *sums, unsigned tiles, const tile_operands &left, const void *b, int line) {
  tile_aligned(b, 1024, "wgmma", line);
  auto lanes = shim::exchange(left, "wgmma", line);
  auto words = static_cast<const std::uint16_t *>(b);
  shim::Product product = {tile_product<number>, sums, nullptr, words, tiles, shim::current->product_batches, {}};
  for (unsigned row = 0; row < 2; row++)
    for (unsigned k = 0; k < 64; k++) {
      unsigned lane = shim::current->lane / 4 * 4 + k % 8 / 2;
      unsigned word = lanes[lane].word[k / 16][row + k % 16 / 8 * 2];
      product.held[row][k] = std::uint16_t(k % 2 ? word >> 16 : word);
    }
  tile_begin(product, line);
}
template <class A> inline tile_operands tile_words(const A &p, const A &q, const A &r, const A &s) {
  const A *all[4] = {&p, &q, &r, &s};
  tile_operands to;
  for (unsigned i = 0; i < 16; i++) to.word[i / 4][i % 4] = all[i / 4]->word[i % 4];
  return to;
}
// A register array of accumulators, or a lone one.
#define TILE_WGMMA(type)                                                                                               \
  template <class C, unsigned count>                                                                                   \
  inline void tk_wgmma_##type(C (&c)[count], const void *a, const void *b, TILE_LINE) {                                \
    tile_wgmma<shim::from_##type>(c[0].element, count, a, b, line);                                                    \
  }                                                                                                                    \
  template <class C> inline void tk_wgmma_##type(C &c, const void *a, const void *b, TILE_LINE) {                      \
    tile_wgmma<shim::from_##type>(c.element, 1, a, b, line);                                                           \
  }                                                                                                                    \
  template <class C, unsigned count, class A>                                                                          \
  inline void tk_wgmma_of_##type(C (&c)[count], const A &p, const A &q, const A &r, const A &s, const void *b, TILE_LINE) { \
    tile_wgmma_of<shim::from_##type>(c[0].element, count, tile_words(p, q, r, s), b, line);                            \
  }                                                                                                                    \
  template <class C, class A>                                                                                          \
  inline void tk_wgmma_of_##type(C &c, const A &p, const A &q, const A &r, const A &s, const void *b, TILE_LINE) {     \
    tile_wgmma_of<shim::from_##type>(c.element, 1, tile_words(p, q, r, s), b, line);                                   \
  }
TILE_WGMMA(f16)
TILE_WGMMA(bf16)
#undef TILE_WGMMA
