/* The machine: ports, clock, interrupts, the keyboard's three keys, and the way out. */
#pragma once

#include "text.h"

#define NEVER UINT64_MAX
#define MS 1000000ull

static inline void port_write(uint16_t port, uint8_t byte) {
    __asm__ volatile("outb %0, %1" : : "a"(byte), "Nd"(port));
}

static inline uint8_t port_read(uint16_t port) {
    uint8_t byte;
    __asm__ volatile("inb %1, %0" : "=a"(byte) : "Nd"(port));
    return byte;
}

static inline uint32_t device_read(uintptr_t address) {
    return *(volatile uint32_t *)address;
}

static inline void device_write(uintptr_t address, uint32_t value) {
    *(volatile uint32_t *)address = value;
}

/* The device and the compiler must see memory in the order written; the CPU's own order is strict enough. */
#define barrier() __asm__ volatile("" : : : "memory")

void machine_start(void);

/* Nanoseconds since the machine was made, by KVM's clock. */
uint64_t now_ns(void);

/* Let an interrupt line wake us. */
void wake_on_line(int line);

/* Sleep until then, or until an interrupt. */
void sleep_until(uint64_t then_ns);

/* Tell whether Ctrl-Alt-Del was pressed since the last question. */
bool ctrl_alt_del(void);

/* Numbers that differ from start to start and machine to machine; not for secrets. */
uint32_t varied(void);
void vary(uint64_t by);

/* The keyboard controller pulls the reset line: Firecracker ends with exit code 0. */
void power_off(void) __attribute__((noreturn));

/* Spin for ever, deaf. */
void hang(void) __attribute__((noreturn));

/* Serial port. */
void serial_write(const char *at, size_t length);

/* Write one line: `guest: ` and the text; forms as in `format`. */
void say(const char *form, ...);
