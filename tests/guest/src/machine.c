#include "machine.h"

enum {
    KEYBOARD_DATA = 0x60,
    KEYBOARD_STATUS = 0x64, /* read: bit 0, a byte waits; write: commands */
    KEYBOARD_RESET = 0xfe,
    DELETE_CODE = 0x71, /* the last key of Ctrl-Alt-Del in scan code set 2 */
    FIRST_PIC_MASK = 0x21,
    SECOND_PIC_MASK = 0xa1,
    KEYBOARD_LINE = 1,
    WAKE_VECTOR = 0x20,
    SPURIOUS_VECTOR = 0x2f,
    TIMER_DIVISOR = 16,
};

static const uintptr_t IO_APIC = 0xfec00000;
static const uintptr_t LOCAL_APIC = 0xfee00000;
static const uint32_t KVM_SYSTEM_TIME = 0x4b564d01;
static const uint64_t SLEEP_NS_MAX = 60000 * MS; /* what the timer's 32 bits hold */

extern void wait_for_interrupt(void);
extern void interrupt_entry(void);
extern void exception_entry(void);
void unexpected_exception(void);

struct gate {
    uint16_t low, selector;
    uint8_t stack, kind;
    uint16_t middle;
    uint32_t high, none;
};

struct table {
    uint16_t limit;
    const void *base;
} __attribute__((packed));

/* KVM keeps this up to date: nanoseconds at a tick of the time stamp counter, and how to go on from there. */
static volatile struct {
    uint32_t version, unused;
    uint64_t tick, ns;
    uint32_t multiplier;
    int8_t shift;
    uint8_t flags, padding[2];
} __attribute__((aligned(64))) clock;

static struct gate gates[SPURIOUS_VECTOR + 1] __attribute__((aligned(16)));
static uint64_t variety;

static uint64_t ticks(void) {
    uint32_t low, high;
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    return (uint64_t)high << 32 | low;
}

uint64_t now_ns(void) {
    uint64_t passed = ticks() - clock.tick;
    passed = clock.shift < 0 ? passed >> -clock.shift : passed << clock.shift;
    return clock.ns + (uint64_t)((unsigned __int128)passed * clock.multiplier >> 32);
}

static void set_gate(int vector, void (*entry)(void)) {
    uintptr_t address = (uintptr_t)entry;
    uint16_t selector;
    __asm__("movw %%cs, %0" : "=r"(selector));
    gates[vector] = (struct gate){
        .low = (uint16_t)address,
        .selector = selector,
        .kind = 0x8e, /* interrupt gate: interrupts are off on entry */
        .middle = (uint16_t)(address >> 16),
        .high = (uint32_t)(address >> 32),
    };
}

void machine_start(void) {
    for (int vector = 0; vector < WAKE_VECTOR; vector++) {
        set_gate(vector, exception_entry);
    }
    set_gate(WAKE_VECTOR, interrupt_entry);
    set_gate(SPURIOUS_VECTOR, interrupt_entry);
    struct table table = {sizeof gates - 1, gates};
    __asm__ volatile("lidt %0" : : "m"(table));

    uintptr_t shared = (uintptr_t)&clock;
    __asm__ volatile("wrmsr" : : "c"(KVM_SYSTEM_TIME), "a"((uint32_t)shared | 1), "d"(0) : "memory");

    /* Every line comes to the old controllers too; they are silenced, and the APICs do the work. */
    port_write(FIRST_PIC_MASK, 0xff);
    port_write(SECOND_PIC_MASK, 0xff);
    device_write(LOCAL_APIC + 0x350, 0x10000); /* the old controllers' pin: masked */
    device_write(LOCAL_APIC + 0xf0, 0x100 | SPURIOUS_VECTOR);
    device_write(LOCAL_APIC + 0x3e0, 3); /* timer: divided by 16, of KVM's 1 GHz */
    device_write(LOCAL_APIC + 0x320, WAKE_VECTOR);
    wake_on_line(KEYBOARD_LINE);
    vary(ticks());
}

void wake_on_line(int line) {
    device_write(IO_APIC, 0x11 + 2 * (uint32_t)line);
    device_write(IO_APIC + 0x10, 0); /* to CPU 0 */
    device_write(IO_APIC, 0x10 + 2 * (uint32_t)line);
    device_write(IO_APIC + 0x10, WAKE_VECTOR); /* edge triggered, not masked */
}

void sleep_until(uint64_t then_ns) {
    uint64_t now = now_ns();
    if (then_ns <= now) {
        return;
    }
    uint64_t wait = then_ns - now < SLEEP_NS_MAX ? then_ns - now : SLEEP_NS_MAX;
    device_write(LOCAL_APIC + 0x380, (uint32_t)(wait / TIMER_DIVISOR) + 1);
    wait_for_interrupt();
}

bool ctrl_alt_del(void) {
    bool pressed = false;
    while (port_read(KEYBOARD_STATUS) & 1) {
        pressed |= port_read(KEYBOARD_DATA) == DELETE_CODE;
    }
    return pressed;
}

void vary(uint64_t by) {
    variety ^= by;
    varied();
}

uint32_t varied(void) {
    /* splitmix64 */
    variety += 0x9e3779b97f4a7c15u;
    uint64_t mixed = variety;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)((mixed ^ mixed >> 31) >> 16);
}

void power_off(void) {
    for (;;) {
        port_write(KEYBOARD_STATUS, KEYBOARD_RESET);
    }
}

void hang(void) {
    for (;;) {
        barrier();
    }
}

void unexpected_exception(void) {
    say("panic: an exception of the CPU");
    power_off();
}
