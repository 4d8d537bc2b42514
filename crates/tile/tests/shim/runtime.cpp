// Runs kernels whose text was compiled for the CPU: fibres, schedules, guarded memory, and a process that takes launches on
// its standard input and answers on its standard output (the format is in src/proof/child.rs).
//
// What it reports, each as one line: threads that wait at different barriers or exchanges, barriers that some threads never
// reach, reads and writes outside an array, writes to an input, undefined arithmetic, and launches without an end. What it
// provokes, by five schedules: the effects of a barrier or a wait that is missing. Memory that was never written holds 0xFF
// bytes, which are NaN in every float format.
#include "runtime.hpp"

#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>
#include <utility>
#include <vector>

#if defined(__linux__) && defined(__x86_64__)
#include <ucontext.h>
#endif

namespace shim {

Fibre *current;
Place group, groups;
uint32_t threads;
bool copies_are_eager;
unsigned char slots[THREADS / LANES][2][LANES][SLOT];

// ---------------------------------------------------------------------------------------------------- context switch

// Saves the caller's callee-saved registers on its stack, stores the stack pointer in `*save`, and continues at `load`,
// a pointer stored by an earlier switch or made by `prepare`.
#if defined(__APPLE__)
#define SYMBOL "_tile_switch"
#else
#define SYMBOL "tile_switch"
#endif

#if defined(__x86_64__)
extern "C" void tile_switch(void **save, void *load);
asm(".text\n.globl " SYMBOL "\n" SYMBOL ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n  ret\n");
static void *prepare(char *top, void (*start)()) {
  void **sp = reinterpret_cast<void **>(top);
  *--sp = nullptr; // keeps the stack 16-byte aligned at `start`, and is where it would return to
  *--sp = reinterpret_cast<void *>(start);
  for (int i = 0; i < 6; i++) *--sp = nullptr;
  return sp;
}
#elif defined(__aarch64__)
extern "C" void tile_switch(void **save, void *load);
asm(".text\n.globl " SYMBOL "\n.p2align 2\n" SYMBOL ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n  ret\n");
static void *prepare(char *top, void (*start)()) {
  void **sp = reinterpret_cast<void **>(top) - 20;
  memset(sp, 0, 160);
  sp[11] = reinterpret_cast<void *>(start); // x30: where `ret` goes
  return sp;
}
#else
// Elsewhere: the C library's contexts. Slower, as each switch is a system call.
#include <ucontext.h>
static void tile_switch(void **save, void *load) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t *>(load));
}
static void *prepare(char *top, void (*start)()) {
  ucontext_t *context = reinterpret_cast<ucontext_t *>(top - sizeof(ucontext_t) - 64);
  getcontext(context);
  context->uc_stack.ss_sp = top - 65536;
  context->uc_stack.ss_size = 65536 - sizeof(ucontext_t) - 128;
  context->uc_link = nullptr;
  makecontext(context, start, 0);
  return context;
}
#endif

// ------------------------------------------------------------------------------------------------------ memory

static const size_t PAGE = size_t(sysconf(_SC_PAGESIZE));

// An array between two guard pages, touching one of them. What is left of its pages holds 0xFF and is checked afterwards.
struct Region {
  std::string name;
  char *map = nullptr;
  size_t mapped = 0;
  char *data = nullptr;
  size_t bytes = 0, element = 1;
  bool writable = true;

  char *first() const { return map + PAGE; }
  char *last() const { return map + mapped - PAGE; }
};

static std::vector<Region> regions; // of this launch: parameters, then threadgroup arrays

// `at_end`: the array touches the guard page behind it, else the one in front. Its address is a multiple of 16 (or what else is
// asked for) either way, as those of device buffers are, so the bytes behind a ragged array are only known by their poison.
static Region guarded(const char *name, size_t bytes, size_t element, bool at_end, size_t align = 16) {
  Region r;
  r.name = name, r.bytes = bytes, r.element = element ? element : 1;
  size_t inner = (bytes + PAGE - 1) / PAGE * PAGE;
  if (!inner) inner = PAGE;
  r.mapped = inner + 2 * PAGE;
  void *map = mmap(nullptr, r.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  if (map == MAP_FAILED) {
    fprintf(stderr, "%s: no memory for %zu bytes\n", name, r.mapped);
    _exit(4);
  }
  r.map = static_cast<char *>(map);
  mprotect(r.map, PAGE, PROT_NONE);
  mprotect(r.last(), PAGE, PROT_NONE);
  r.data = at_end ? r.last() - (bytes + align - 1) / align * align : r.first();
  memset(r.first(), 0xFF, inner);
  return r;
}

static void release_regions() {
  for (Region &r : regions) munmap(r.map, r.mapped);
  regions.clear();
}

// Whether the bytes around an array are as they were; the distance of the first that is not.
static bool untouched(const Region &r, long &at) {
  for (const char *p = r.first(); p < r.last(); p++) {
    if (p == r.data) p += r.bytes;
    if (p >= r.last()) break;
    if (*p != char(0xFF)) {
      at = p - r.data;
      return false;
    }
  }
  return true;
}

// ---------------------------------------------------------------------------------------------------- fibres

constexpr size_t STACK = 256 << 10;
static Fibre *fibres;
static void *scheduler; // its stack pointer while a fibre runs
static bool failed;
static char message[1024];
static const Entry *entry;
static void **arguments;
static bool arrays_at_end;
static uint32_t dynamic_bytes;

enum Schedule : uint32_t { Forward, Backward, Shuffled, FirstAhead, LastAhead };
static uint32_t schedule;
static uint64_t random_state;

static uint32_t random_below(uint32_t n) {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return uint32_t((random_state >> 33) % n);
}

static void report(const char *format, ...) {
  if (failed) return; // the first finding is the one to read
  failed = true;
  va_list list;
  va_start(list, format);
  vsnprintf(message, sizeof message, format, list);
  va_end(list);
}

void fail(const char *format, ...) {
  if (!failed) {
    failed = true;
    va_list list;
    va_start(list, format);
    vsnprintf(message, sizeof message, format, list);
    va_end(list);
  }
  for (;;) tile_switch(&current->stack_pointer, scheduler);
}

[[gnu::noinline]] void wait(State state, const char *what, int line) {
  current->state = state;
  current->what = what;
  current->line = line;
  tile_switch(&current->stack_pointer, scheduler);
}

static void start() {
  entry->body(arguments);
  wait(State::Returned, "", 0);
  abort();
}

static void resume(Fibre &f) {
  current = &f;
  tile_switch(&scheduler, f.stack_pointer);
}

static std::string describe(const Fibre &f) {
  char text[160];
  if (f.state == State::Returned) snprintf(text, sizeof text, "thread %u has returned", f.index);
  else snprintf(text, sizeof text, "thread %u waits at %s (line %d, exchange %u)", f.index, f.what, f.line, f.exchanges);
  return text;
}

// Two fibres are at one place if they wait at the same line and have taken part in as many exchanges: those of a loop's turns
// are on one line.
static bool together(const Fibre &a, const Fibre &b) {
  return a.state == b.state && a.line == b.line && a.exchanges == b.exchanges;
}

// Runs the lanes of a simdgroup until each waits or has returned. True if it may go on at once: all of them waited at the
// same exchange. False if it waits for the threadgroup, has returned, or something is wrong.
static bool step(uint32_t simd) {
  Fibre *lanes = fibres + simd * LANES;
  if (lanes[0].state != State::Running) return false;
  uint32_t order[LANES];
  for (uint32_t i = 0; i < LANES; i++) order[i] = schedule == Backward ? LANES - 1 - i : i;
  if (schedule == Shuffled)
    for (uint32_t i = LANES; i > 1; i--) std::swap(order[i - 1], order[random_below(i)]);
  for (uint32_t i : order) {
    resume(lanes[i]);
    if (failed) return false;
  }
  for (uint32_t i = 1; i < LANES; i++) {
    if (!together(lanes[0], lanes[i])) {
      report("simdgroup %u diverged: %s, %s", simd, describe(lanes[0]).c_str(), describe(lanes[i]).c_str());
      return false;
    }
  }
  if (lanes[0].state != State::Simd) return false;
  for (uint32_t i = 0; i < LANES; i++) lanes[i].state = State::Running;
  return true;
}

// Runs one threadgroup.
static void run_group() {
  uint32_t simds = threads / LANES;
  for (uint32_t i = 0; i < threads; i++) {
    Fibre &f = fibres[i];
    f.stack_pointer = prepare(f.stack + STACK, start);
    f.state = State::Running, f.line = 0, f.what = "";
    f.index = i, f.lane = i % LANES, f.simd = i / LANES;
    f.exchanges = f.batches = f.copies = f.product_batches = f.products = 0;
  }
  std::vector<uint32_t> live;
  for (;;) {
    live.clear();
    for (uint32_t s = 0; s < simds; s++) live.push_back(s);
    // The simdgroups that can go on, until all of them wait for the threadgroup. Forward and backward they take turns; in
    // the last two schedules one runs as far ahead of the others as barriers let it.
    for (size_t turn = 0; !live.empty(); turn++) {
      size_t n = live.size(), at = 0;
      switch (schedule) {
      case Forward: at = turn % n; break;
      case Backward: at = n - 1 - turn % n; break;
      case Shuffled: at = random_below(uint32_t(n)); break;
      case FirstAhead: at = 0; break;
      case LastAhead: at = n - 1; break;
      }
      if (!step(live[at])) live.erase(live.begin() + long(at));
      if (failed) return;
    }
    for (uint32_t i = 1; i < threads; i++) {
      if (fibres[0].state != fibres[i].state || fibres[0].line != fibres[i].line)
        return report("divergent barrier: %s, %s", describe(fibres[0]).c_str(), describe(fibres[i]).c_str());
    }
    if (fibres[0].state == State::Returned) return;
    for (uint32_t i = 0; i < threads; i++) fibres[i].state = State::Running;
  }
}

static uint64_t epoch; // of the threadgroup that runs
static std::vector<uint64_t> poisoned; // by region: the epoch in which it was last poisoned
static size_t parameters;              // regions that are not threadgroup arrays

static void *array_of(const char *name, size_t bytes, size_t element, size_t align) {
  size_t at = parameters;
  // A kernel's arrays have distinct names: they are declared in one scope.
  while (at < regions.size() && regions[at].name != name) at++;
  if (at == regions.size()) {
    regions.push_back(guarded(name, bytes, element, arrays_at_end, align));
    poisoned.resize(regions.size());
  }
  if (poisoned[at] != epoch) {
    memset(regions[at].data, 0xFF, bytes);
    poisoned[at] = epoch;
  }
  return regions[at].data;
}

void *shared_array(const char *name, size_t bytes, size_t element) { return array_of(name, bytes, element, 16); }

void *dynamic_shared(const char *name, size_t align) { return array_of(name, dynamic_bytes, 1, align); }

// Runs every threadgroup of the grid, in the schedule's order too.
static void run_grid() {
  uint64_t count = uint64_t(groups.x) * groups.y * groups.z;
  std::vector<uint32_t> order(count);
  for (uint64_t i = 0; i < count; i++)
    order[i] = uint32_t(schedule == Backward || schedule == LastAhead ? count - 1 - i : i);
  if (schedule == Shuffled)
    for (uint64_t i = count; i > 1; i--) std::swap(order[i - 1], order[random_below(uint32_t(i))]);
  for (uint32_t i : order) {
    group = {i % groups.x, i / groups.x % groups.y, i / groups.x / groups.y};
    epoch++;
    run_group();
    if (failed) break;
  }
  for (const Region &r : regions) {
    long at;
    if (!failed && !untouched(r, at))
      report("write outside `%s`: at byte %ld of %zu", r.name.c_str(), at, r.bytes);
  }
}

// ---------------------------------------------------------------------------------------------------- answers

static void write_all(const void *data, size_t bytes) {
  const char *p = static_cast<const char *>(data);
  while (bytes) {
    ssize_t n = write(1, p, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) _exit(5);
    p += n, bytes -= size_t(n);
  }
}

static void read_all(void *data, size_t bytes) {
  char *p = static_cast<char *>(data);
  while (bytes) {
    ssize_t n = read(0, p, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) _exit(n == 0 ? 0 : 5); // the end of the input is how the process is told to stop
    p += n, bytes -= size_t(n);
  }
}

static uint32_t read_word() {
  uint32_t word;
  read_all(&word, sizeof word);
  return word;
}

enum Status : uint32_t { Done, Wrong, Died };

static void answer(Status status) {
  uint32_t head[2] = {status, status == Done ? 0 : uint32_t(strlen(message))};
  write_all(head, sizeof head);
  write_all(message, head[1]);
}

// A fault: says what was touched, then ends the process, whose state is no longer to be trusted.
static void on_signal(int signal, siginfo_t *info, void *context) {
  const char *verb = "access";
#if defined(__linux__) && defined(__x86_64__)
  // Bit 1 of the page fault's error code is set for writes.
  verb = static_cast<ucontext_t *>(context)->uc_mcontext.gregs[REG_ERR] & 2 ? "write" : "read";
#else
  (void)context;
#endif
  char where[96] = "";
  if (current)
    snprintf(where, sizeof where, " by thread %u of threadgroup (%u, %u, %u)", current->index, group.x, group.y, group.z);
  failed = false;
  if (signal == SIGPROF) {
    report("no end in sight: the launch takes too long%s", where);
  } else if (signal == SIGFPE) {
    report("division by zero%s", where);
  } else if (signal == SIGILL || signal == SIGTRAP) {
    report("undefined arithmetic or misaligned access%s", where);
  } else {
    char *at = static_cast<char *>(info->si_addr);
    for (const Region &r : regions) {
      if (at < r.map || at >= r.map + r.mapped) continue;
      long offset = at - r.data;
      if (offset >= 0 && size_t(offset) < r.bytes)
        report("write to input `%s`, element %ld%s", r.name.c_str(), offset / long(r.element), where);
      else
        report("%s outside `%s`: element %ld of %zu%s", verb, r.name.c_str(),
               (offset - (offset < 0 ? long(r.element) - 1 : 0)) / long(r.element), r.bytes / r.element, where);
    }
    report("%s of address %p, which belongs to no array (or is misaligned)%s", verb, static_cast<void *>(at), where);
  }
  answer(Died);
  _exit(3);
}

// Bounds what a launch may take, in seconds of this process alone: a busy machine does not make a launch endless.
static void limit(long seconds) {
  itimerval timer{};
  timer.it_value.tv_sec = seconds;
  setitimer(ITIMER_PROF, &timer, nullptr);
}

// Takes one launch from the input.
static void serve() {
  uint32_t which = read_word();
  entry = &entries[which];
  schedule = read_word();
  random_state = 0x9E3779B97F4A7C15u;
  groups.x = read_word(), groups.y = read_word(), groups.z = read_word();
  threads = read_word();
  dynamic_bytes = read_word();
  arrays_at_end = schedule != Backward;
  copies_are_eager = schedule == Forward || schedule == FirstAhead;
  for (uint32_t n = read_word(); n; n--) {
    const Constant &constant = constants[read_word()];
    uint32_t value = read_word();
    if (constant.bytes == 1) value = value != 0; // a bool
    memcpy(constant.at, &value, constant.bytes);
  }
  release_regions();
  uint32_t count = read_word();
  std::vector<uint32_t> numbers(count);
  std::vector<void *> bound(count);
  for (uint32_t i = 0; i < count; i++) {
    uint32_t kind = read_word(); // 0: a number, 1: a buffer that is read, 2: one that is written
    if (kind == 0) {
      numbers[i] = read_word();
      bound[i] = &numbers[i];
      continue;
    }
    uint32_t element = read_word(), bytes = read_word();
    Region r = guarded(entry->parameters[i], bytes, element, arrays_at_end);
    read_all(r.data, bytes);
    r.writable = kind == 2;
    if (!r.writable) mprotect(r.first(), size_t(r.last() - r.first()), PROT_READ);
    bound[i] = r.data;
    regions.push_back(r);
  }
  parameters = regions.size();
  poisoned.assign(parameters, 0);
  arguments = bound.data();
  failed = false;
  if (threads == 0 || threads > THREADS || threads % LANES) report("%u threads in a threadgroup", threads);
  limit(60);
  if (!failed) run_grid();
  limit(0);
  current = nullptr;
  answer(failed ? Wrong : Done);
  if (failed) return;
  for (size_t i = 0; i < parameters; i++)
    if (regions[i].writable) write_all(regions[i].data, regions[i].bytes);
}

} // namespace shim

int main() {
  using namespace shim;
  static char alternate[64 << 10];
  stack_t stack{};
  stack.ss_sp = alternate, stack.ss_size = sizeof alternate;
  sigaltstack(&stack, nullptr);
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int signal : {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE, SIGPROF}) sigaction(signal, &action, nullptr);
  fibres = static_cast<Fibre *>(calloc(THREADS, sizeof(Fibre)));
  for (uint32_t i = 0; i < THREADS; i++) {
    void *map = mmap(nullptr, STACK + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return 4;
    mprotect(map, PAGE, PROT_NONE); // a stack that overflows faults
    fibres[i].stack = static_cast<char *>(map) + PAGE;
  }
  for (;;) serve();
}
