// What kernel text compiled for the CPU is linked with: see runtime.cpp.
//
// The threads of a threadgroup are fibres on one CPU thread. A fibre runs until an operation that other threads take part
// in (a barrier, an exchange within a simdgroup), then the schedule picks another. No C++ library header is
// included here, so that the names of a shader language never meet those of <cmath>.
#pragma once
#include <cstddef>
#include <cstdint>

namespace shim {

constexpr unsigned LANES = 32;    // of a simdgroup (warp)
constexpr unsigned THREADS = 1024; // of a threadgroup, at most

struct Place {
  uint32_t x, y, z;
};

enum class State : uint32_t {
  Running,   // may be resumed
  Simd,      // waits for the other lanes of its simdgroup
  Threadgroup, // waits for all threads of its threadgroup
  Returned,
};

// An asynchronous copy that has not been waited for.
struct Copy {
  void *to;
  const void *from; // nullptr: zeros
  unsigned bytes;
  unsigned batch; // how many batches its thread had closed when it was issued
};

// A product of a warpgroup that has not been waited for: this thread's part of it.
struct Product {
  void (*run)(const Product &);
  float *sums;
  const uint16_t *a, *b;
  unsigned tiles;
  unsigned batch;
  uint16_t held[2][64]; // where there is no `a`: this thread's rows of it
};

// One thread of the threadgroup that runs.
struct Fibre {
  void *stack_pointer;
  char *stack;
  State state;
  int line;         // of the operation it waits at, in the kernel text
  const char *what; // the name of that operation
  uint32_t index, lane, simd;
  uint32_t exchanges; // how many it took part in
  uint32_t batches;   // of asynchronous copies closed
  uint32_t copies;    // in flight
  Copy flight[256];
  uint32_t product_batches; // closed
  uint32_t products;        // under way
  Product product[16];
};

extern Fibre *current;
extern Place group, groups;   // the threadgroup that runs, and how many there are
extern uint32_t threads;      // of a threadgroup
extern bool copies_are_eager; // the schedule completes asynchronous copies at once rather than at the wait

// Suspends the current fibre.
void wait(State state, const char *what, int line);

// Ends the launch with a message.
[[noreturn]] void fail(const char *format, ...);

// The threadgroup array declared at a place of the text: poisoned for each threadgroup, next to a guard page.
void *shared_array(const char *name, size_t bytes, size_t element);
// The threadgroup memory whose size is given at launch, at a multiple of so many bytes.
void *dynamic_shared(const char *name, size_t align);

// Values that the lanes of each simdgroup show one another. Two sets: a lane may be at its next exchange while another
// still reads this one, never further.
constexpr size_t SLOT = 64;
extern unsigned char slots[THREADS / LANES][2][LANES][SLOT];

template <class T> struct Lanes {
  const unsigned char (*from)[SLOT];
  T operator[](unsigned lane) const {
    T value;
    __builtin_memcpy(static_cast<void *>(&value), from[lane % LANES], sizeof value);
    return value;
  }
};

// Every lane publishes a value, then sees those of all.
template <class T> inline Lanes<T> exchange(const T &value, const char *what, int line) {
  static_assert(sizeof(T) <= SLOT, "a value fits its slot");
  auto *set = slots[current->simd][++current->exchanges & 1];
  __builtin_memcpy(set[current->lane], static_cast<const void *>(&value), sizeof value);
  wait(State::Simd, what, line);
  return {set};
}

// What a launch binds, by the parameter's index. A wrapper that takes the type the parameter has.
struct Buffer {
  void *at;
  template <class T> operator T *() const { return static_cast<T *>(at); }
};
struct Argument {
  void *at;
  template <class T> operator T &() const { return *static_cast<T *>(at); }
};

// A kernel of the text.
struct Entry {
  const char *name;
  void (*body)(void **arguments);
  const char *const *parameters; // names, for messages
};
// A specialisation constant of the text.
struct Constant {
  const char *name;
  void *at;
  size_t bytes;
};
// Defined by the text's translation unit.
extern const Entry entries[];
extern const Constant constants[];

template <class To, class From> inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same size");
  To to;
  __builtin_memcpy(static_cast<void *>(&to), static_cast<const void *>(&from), sizeof to);
  return to;
}

// IEEE half precision by its bits: conversions round to nearest, ties to even, subnormals included.
inline uint16_t to_f16(float x) {
  uint32_t u = bits<uint32_t>(x), sign = u >> 16 & 0x8000, magnitude = u & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return uint16_t(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));
  if (magnitude >= 0x477FF000) return uint16_t(sign | 0x7C00); // 65520 and more
  if (magnitude < 0x38800000) { // below 2^-14: adding 0.5 leaves the rounded result in the low bits
    float shifted = bits<float>(magnitude) + 0.5f;
    return uint16_t(sign | (bits<uint32_t>(shifted) - 0x3F000000));
  }
  uint32_t odd = magnitude >> 13 & 1;
  return uint16_t(sign | ((magnitude - 0x38000000 + 0xFFF + odd) >> 13));
}
inline float from_f16(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3FF;
  if (exponent == 31) return bits<float>(sign | 0x7F800000 | fraction << 13);
  if (exponent == 0) return bits<float>(sign | bits<uint32_t>(float(fraction) * 0x1p-24f));
  return bits<float>(sign | (exponent + 112) << 23 | fraction << 13);
}
// The upper half of a float, likewise.
inline uint16_t to_bf16(float x) {
  uint32_t u = bits<uint32_t>(x);
  if (x != x) return uint16_t(u >> 16 | 0x40);
  return uint16_t((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}
inline float from_bf16(uint16_t b) { return bits<float>(uint32_t(b) << 16); }

} // namespace shim

// `threadgroup T name[n];` and `__shared__ T name[n];` are rewritten to this.
#define TILE_SHARED(type, name, dimensions)                                                                            \
  auto &name = *static_cast<type(*) dimensions>(shim::shared_array(#name, sizeof(type dimensions), sizeof(type)))
