// Executes one kernel on a processor and checks it: the other half of metal_stdlib.
//
// A threadgroup's threads are fibers of one processor thread. A fiber runs until it ends or waits: at a barrier, or in
// a function of its simdgroup. When all lanes of a simdgroup wait at the same place they go on; when all simdgroups of
// a threadgroup wait at the same barrier, they do. Anything else is a divergent barrier and ends the launch.
//
// The kernels are compiled with clang's thread sanitizer, and the calls that it places before every access to memory
// come here (`access`): an address has to lie in a buffer that is bound, in the threadgroup's memory or on the fiber's
// own stack, and two threads may touch the same word, one of them writing, only with a barrier between that orders
// that kind of memory. So a missing barrier is found whatever order the fibers happen to run in.
//
// Each kernel is compiled with a copy of this file, which is why globals will do. Rust (src/emulator.rs) hands in the
// buffers; `enter`, which it generates, calls the kernel with its arguments.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "metal_stdlib"

namespace {

constexpr int MOST_THREADS = 1024, WIDTH = 32, MOST_REGIONS = 16;
constexpr uint64_t STACK = 64 << 10;
constexpr uint16_t MANY = 0xffff, ATOMIC = 0xfffe, OF_SIMDGROUP = 0x8000;
constexpr uint32_t MANY_GROUPS = ~0u;

// Who last wrote and read a word of memory, in which launch and between which barriers.
struct Cell {
    uint32_t launch, write_group, read_group;
    uint16_t writer, write_epoch, write_simd;
    uint16_t reader, read_epoch, read_simd;
};

}  // namespace

extern "C" struct Region {
    char* base;
    uint64_t bytes;
    Cell* cells;  // one a word; null where nothing is written
};

// Generated beside the kernel: calls it with the bound arguments.
void enter(const Region* regions, char* shared);

namespace {

struct Fiber {
    void* stack_pointer;
    char* stack;
    emulator::Position position;
    enum { IN_SIMDGROUP, IN_THREADGROUP, DONE } state;
    const void* site;
    int flags;
    uint64_t matrix_operations;
};

Fiber fibers[MOST_THREADS];
Fiber* current;
void* scheduler_pointer;
uint32_t threads;

Region regions[MOST_REGIONS];
int region_count;
Region shared;  // threadgroup memory
Cell shared_cells[32768 / 4];
alignas(16) char shared_memory[32768];

uint32_t launch_number, group_number;
// Barriers passed, by kind of memory (0 device, 1 threadgroup): of the threadgroup, and of each simdgroup.
uint16_t epochs[2], simd_epochs[MOST_THREADS / WIDTH][2];
emulator::Exchange exchanged[MOST_THREADS / WIDTH][2];
uint32_t exchanges[MOST_THREADS];

char* error_text;
uint64_t error_size;

extern "C" void kipp_switch(void** save, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.globl kipp_switch
.hidden kipp_switch
kipp_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx      # not ret, whose prediction would be wrong every time
)");
constexpr int SAVED = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.globl kipp_switch
.hidden kipp_switch
kipp_switch:
    stp x29, x30, [sp, #-160]!
    stp x19, x20, [sp, #16]
    stp x21, x22, [sp, #32]
    stp x23, x24, [sp, #48]
    stp x25, x26, [sp, #64]
    stp x27, x28, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #16]
    ldp x21, x22, [sp, #32]
    ldp x23, x24, [sp, #48]
    ldp x25, x26, [sp, #64]
    ldp x27, x28, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    ldp x29, x30, [sp], #160
    ret
)");
#else
#error "no fibers for this processor"
#endif

void to_scheduler() { kipp_switch(&current->stack_pointer, scheduler_pointer); }

// On to the next lane of the simdgroup, from the last one to the scheduler.
void to_next() {
    if (current->position.lane + 1 == WIDTH) return to_scheduler();
    Fiber* from = current++;
    kipp_switch(&from->stack_pointer, current->stack_pointer);
}

// Ends the launch. The fibers stay where they are and are never resumed.
__attribute__((format(printf, 1, 2))) void fail(const char* format, ...) {
    if (!*error_text) {
        int at = 0;
        if (current) {
            const emulator::Position& p = current->position;
            at = snprintf(error_text, error_size, "threadgroup (%u, %u, %u), thread %u: ", p.group.x, p.group.y,
                          p.group.z, p.thread_index);
        }
        va_list list;
        va_start(list, format);
        vsnprintf(error_text + at, error_size - at, format, list);
        va_end(list);
    }
    if (current)
        for (;;) to_scheduler();
}

const char* name_of(uint16_t thread_index, char* text) {
    if (thread_index == MANY) return "several threads";
    if (thread_index == ATOMIC) return "an atomic operation";
    if (thread_index & OF_SIMDGROUP) snprintf(text, 32, "simdgroup %u", thread_index & 1023);
    else snprintf(text, 32, "thread %u", thread_index);
    return text;
}

// Memory by what a launch calls it: threadgroup memory, or the number of a buffer.
constexpr int SHARED = -1;
const char* place(int region, char* text) {
    if (region == SHARED) return "threadgroup memory";
    snprintf(text, 32, "buffer %d", region);
    return text;
}

// Two accesses without a barrier between them.
void race(const char* now, const char* before, uint16_t other, bool other_group, int region, uint64_t offset) {
    char where[32], who[32];
    fail("race: %s %s at byte %lu that %s %s%s, no barrier between", now, place(region, where), (unsigned long)offset,
         name_of(other, who), before, other_group ? " in another threadgroup" : "");
}

// Checks one word against who touched it before.
void check_word(Cell& cell, int region, bool write, bool atomic, uint64_t offset) {
    const emulator::Position& p = current->position;
    int kind = region == SHARED;
    uint16_t me = p.thread_index, epoch = epochs[kind], simd = simd_epochs[p.simdgroup][kind];
    // Epochs count from 1, so that 0 says never. Threadgroup memory begins anew with every threadgroup.
    if (cell.launch != launch_number || (region == SHARED && cell.write_group != group_number))
        cell = Cell{launch_number, group_number, group_number, me, 0, 0, me, 0, 0};
    auto ordered = [&](uint16_t thread_index, uint16_t before, uint16_t simd_before) {
        if (before < epoch || thread_index == me) return true;
        if (thread_index == MANY || thread_index == ATOMIC) return false;
        uint32_t simdgroup = thread_index & OF_SIMDGROUP ? thread_index & 1023 : thread_index / WIDTH;
        return simdgroup == p.simdgroup && simd_before < simd;
    };
    bool written = cell.write_epoch > 0;
    bool both_atomic = atomic && cell.writer == ATOMIC;
    if (written && !both_atomic) {
        bool elsewhere = cell.write_group != group_number;
        if (elsewhere || !ordered(cell.writer, cell.write_epoch, cell.write_simd))
            return race(write ? "writes" : "reads", "wrote", cell.writer, elsewhere, region, offset);
    }
    if (write) {
        if (cell.read_epoch > 0) {
            bool elsewhere = cell.read_group != group_number;
            if (elsewhere || !ordered(cell.reader, cell.read_epoch, cell.read_simd))
                return race("writes", "read", cell.reader, elsewhere, region, offset);
        }
        cell.write_group = group_number;
        cell.writer = atomic ? ATOMIC : me;
        cell.write_epoch = epoch;
        cell.write_simd = simd;
        return;
    }
    if (cell.read_epoch > 0 && cell.read_group != group_number) {
        cell.read_group = MANY_GROUPS;
    } else if (ordered(cell.reader, cell.read_epoch, cell.read_simd)) {
        cell.read_group = group_number;
        cell.reader = me;
    } else if (cell.reader != me && cell.reader != MANY) {
        uint32_t simdgroup = cell.reader & OF_SIMDGROUP ? cell.reader & 1023 : cell.reader / WIDTH;
        cell.reader = simdgroup == p.simdgroup ? uint16_t(OF_SIMDGROUP | simdgroup) : MANY;
    }
    cell.read_epoch = epoch;
    cell.read_simd = simd;
}

inline void check_words(const Region& memory, int region, const char* at, uint64_t bytes, bool write, bool atomic) {
    uint64_t first = at - memory.base;
    for (uint64_t word = first / 4; word * 4 < first + bytes; word++)
        check_word(memory.cells[word], region, write, atomic, first);
}

extern "C" char __ehdr_start __attribute__((visibility("hidden")));
extern "C" char _end __attribute__((visibility("hidden")));

inline void check(const void* address, uint64_t bytes, bool write, bool atomic = false) {
    const char* at = static_cast<const char*>(address);
    if (uint64_t(at - current->stack) < STACK) return;
    auto inside = [&](const Region& region) {
        uint64_t offset = at - region.base;
        return offset < region.bytes && bytes <= region.bytes - offset;
    };
    if (inside(shared)) return check_words(shared, SHARED, at, bytes, write, atomic);
    for (int i = 0; i < region_count; i++) {
        if (!inside(regions[i])) continue;
        if (regions[i].cells) return check_words(regions[i], i, at, bytes, write, atomic);
        if (write) fail("writes %lu bytes to buffer %d, which is constant", (unsigned long)bytes, i);
        return;
    }
    if (at >= &__ehdr_start && at < &_end) return;  // constants of the program
    // The nearest buffer says most about what went wrong.
    const Region* nearest = &shared;
    int index = SHARED;
    auto distance = [&](const Region& memory) {
        return at < memory.base ? memory.base - at : at - (memory.base + memory.bytes) + 1;
    };
    for (int i = 0; i < region_count; i++)
        if (distance(regions[i]) < distance(*nearest)) nearest = &regions[i], index = i;
    char where[32];
    fail("out of bounds: %s %lu bytes at byte %ld of %s, which has %lu", write ? "writes" : "reads",
         (unsigned long)bytes, (long)(at - nearest->base), place(index, where), (unsigned long)nearest->bytes);
}

void begin() {
    enter(regions, shared.base);
    current->state = Fiber::DONE;
    current->site = nullptr;
    to_next();
}

void prepare(Fiber& fiber) {
    // Stacks begin at different places of their pages, or all of them would share a few lines of the cache.
    uint64_t shift = fiber.position.thread_index * 832 % 16384;
    void** top = reinterpret_cast<void**>(fiber.stack + STACK - shift);
#if defined(__x86_64__)
    *--top = nullptr;  // so that the stack is aligned as after a call
    *--top = reinterpret_cast<void*>(begin);
    for (int i = 0; i < SAVED; i++) *--top = nullptr;
#else
    top -= 20;
    memset(top, 0, 160);
    top[1] = reinterpret_cast<void*>(begin);
#endif
    fiber.stack_pointer = top;
    fiber.state = Fiber::IN_THREADGROUP;
    fiber.matrix_operations = 0;
}

// Runs the lanes of a simdgroup until they all wait for the threadgroup or have ended.
bool run_simdgroup(uint32_t simdgroup) {
    Fiber* lanes = fibers + simdgroup * WIDTH;
    if (lanes[0].state == Fiber::DONE) return true;
    for (;;) {
        current = lanes;
        kipp_switch(&scheduler_pointer, current->stack_pointer);
        if (*error_text) return false;
        for (uint32_t lane = 1; lane < WIDTH; lane++) {
            current = &lanes[lane];
            if (lanes[lane].state != lanes[0].state || lanes[lane].site != lanes[0].site) {
                current = nullptr;
                fail("divergence: lanes 0 and %u of simdgroup %u do not wait at the same barrier", lane,
                     simdgroup);
                return false;
            }
            if (lanes[lane].matrix_operations != lanes[0].matrix_operations) {
                current = nullptr;
                fail("divergence: lanes 0 and %u of simdgroup %u took part in different matrix operations", lane,
                     simdgroup);
                return false;
            }
        }
        if (lanes[0].state != Fiber::IN_SIMDGROUP) return true;
        for (int kind = 0; kind < 2; kind++)
            if (lanes[0].flags & (1 << kind)) simd_epochs[simdgroup][kind]++;
    }
}

bool run_group(emulator::Position position) {
    uint32_t simdgroups = threads / WIDTH;
    group_number++;
    epochs[0] = epochs[1] = 1;
    memset(simd_epochs, 0, sizeof simd_epochs);
    memset(shared.base, 0xff, shared.bytes);  // NaN, to whoever reads what was not written
    for (uint32_t i = 0; i < threads; i++) {
        position.thread_index = i, position.lane = i % WIDTH, position.simdgroup = i / WIDTH;
        fibers[i].position = position;
        fibers[i].site = nullptr;
        exchanges[i] = 0;
        prepare(fibers[i]);
    }
    for (;;) {
        for (uint32_t s = 0; s < simdgroups; s++)
            if (!run_simdgroup(s)) return false;
        for (uint32_t s = 1; s < simdgroups; s++) {
            Fiber& other = fibers[s * WIDTH];
            if (other.state != fibers[0].state || other.site != fibers[0].site) {
                current = nullptr;
                fail("divergence: simdgroups 0 and %u do not wait at the same barrier", s);
                return false;
            }
        }
        if (fibers[0].state == Fiber::DONE) return true;
        for (int kind = 0; kind < 2; kind++)
            if (fibers[0].flags & (1 << kind)) epochs[kind]++;
    }
}

void wait(decltype(Fiber::state) state, const void* site, int flags) {
    current->state = state;
    current->site = site;
    current->flags = flags;
    to_next();
}

}  // namespace

namespace emulator {

const Position& here() { return current->position; }

__attribute__((noinline)) void barrier(Scope scope, int flags) {
    wait(scope == SIMDGROUP ? Fiber::IN_SIMDGROUP : Fiber::IN_THREADGROUP, __builtin_return_address(0), flags);
}

Exchange& exchange(Bits value, const void* site) {
    // Two places in turn: a lane can be one exchange ahead of the others, never two.
    const Position& p = current->position;
    Exchange& here = exchanged[p.simdgroup][exchanges[p.thread_index]++ % 2];
    here.values[p.lane] = value;
    here.reduced = false;
    wait(Fiber::IN_SIMDGROUP, site, 0);
    return here;
}

void access(const void* address, ulong bytes, bool write) { check(address, bytes, write); }

void* atomic(void* address) {
    check(address, 4, true, true);
    return address;
}

void tensor_operation(int wanted, const void* site) {
    if (uint32_t(wanted) != threads) return fail("an operation of %d threads in a threadgroup of %u", wanted, threads);
    wait(Fiber::IN_THREADGROUP, site, 0);
}

bool performs() {
    current->matrix_operations++;
    return current->position.lane == 0;
}

void multiply_accumulate(float* d, const float* a, const float* b, const float* c) {
    float sums[64];
    memcpy(sums, c, sizeof sums);
    for (int k = 0; k < 8; k++)
        for (int i = 0; i < 8; i++)
            for (int j = 0; j < 8; j++) sums[i * 8 + j] = __builtin_fmaf(a[i * 8 + k], b[k * 8 + j], sums[i * 8 + j]);
    memcpy(d, sums, sizeof sums);
}

}  // namespace emulator

// What clang's thread sanitizer calls before every access.
#define ACCESSES(bytes)                                                                       \
    extern "C" void __tsan_read##bytes(void* address) { check(address, bytes, false); }       \
    extern "C" void __tsan_write##bytes(void* address) { check(address, bytes, true); }
#define UNALIGNED(bytes)                                                                                \
    extern "C" void __tsan_unaligned_read##bytes(void* address) { check(address, bytes, false); }      \
    extern "C" void __tsan_unaligned_write##bytes(void* address) { check(address, bytes, true); }
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)
UNALIGNED(2) UNALIGNED(4) UNALIGNED(8) UNALIGNED(16)
extern "C" void __tsan_init() {}

// Runs a grid. `cells` of a region are not null where the kernel may write. Returns 0, or 1 with a text in `error`.
extern "C" __attribute__((visibility("default"))) int kipp_launch(const Region* bound, int count,
                                                                  uint32_t shared_bytes, const uint32_t* grid,
                                                                  uint32_t thread_count, uint32_t launch, char* error,
                                                                  uint64_t size) {
    error_text = error, error_size = size;
    *error = 0;
    current = nullptr;
    if (count > MOST_REGIONS || thread_count > MOST_THREADS || thread_count % WIDTH || shared_bytes > sizeof shared_memory) {
        fail("%d buffers, %u threads, %u bytes of threadgroup memory: too many, or not whole simdgroups", count,
             thread_count, shared_bytes);
        return 1;
    }
    if (!fibers[0].stack) {
        void* stacks = mmap(nullptr, MOST_THREADS * STACK, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stacks == MAP_FAILED) {
            fail("no memory for fibers");
            return 1;
        }
        for (int i = 0; i < MOST_THREADS; i++) fibers[i].stack = static_cast<char*>(stacks) + i * STACK;
    }
    memcpy(regions, bound, count * sizeof *bound);
    region_count = count;
    shared = {shared_memory, shared_bytes, shared_cells};
    threads = thread_count;
    launch_number = launch;
    group_number = 0;
    emulator::Position position = {};
    for (uint32_t z = 0; z < grid[2]; z++)
        for (uint32_t y = 0; y < grid[1]; y++)
            for (uint32_t x = 0; x < grid[0]; x++) {
                position.group = uint3{x, y, z};
                if (!run_group(position)) return 1;
            }
    return 0;
}
