/* The first instructions, the page tables, and sleeping until an interrupt.
 *
 * Firecracker starts us by Linux's 64-bit boot protocol: long mode, paging on, interrupts off, RSI = boot parameters.
 */

    .section .text.start, "ax"
    .globl _start
_start:
    cli
    cld
    movl $stack_end, %esp
    /* Firecracker maps the first GiB only; the devices are in the fourth. */
    movl $level4, %eax
    movq %rax, %cr3
    movq %rsi, %rdi
    xorl %ebp, %ebp
    call main
1:  hlt
    jmp 1b

    .text
/* void wait_for_interrupt(void): sleep; returns when any interrupt came, with interrupts off again.
 *
 * Interrupts are on between `sti` and the wake only, so a handler has nothing to restore but the registers that a C
 * function must keep. It therefore never returns to where it interrupted, which matters: nested KVMs that emulate
 * guests deliver interrupts but do not know `iretq`. `sti` takes effect after the next instruction, so an interrupt
 * that is already waiting cannot slip in before `hlt`.
 */
    .globl wait_for_interrupt
wait_for_interrupt:
    pushq %rbx
    pushq %rbp
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, sleeper_stack
    sti
    hlt
    cli
woken:
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbp
    popq %rbx
    ret

    .globl interrupt_entry
interrupt_entry:
    movq sleeper_stack, %rsp
    movl $0xfee000b0, %eax      /* end of interrupt, at the local APIC */
    movl $0, (%rax)
    jmp woken

    .globl exception_entry
exception_entry:
    movl $stack_end, %esp
    call unexpected_exception
1:  hlt
    jmp 1b

    .data
/* Made by the assembler and not at run time: filling a thousand entries would take an emulated CPU milliseconds. */
    .balign 4096
level4:
    .quad level3 + 3
    .fill 511, 8, 0
level3:
    .quad memory_pages + 3
    .quad 0
    .quad 0
    .quad device_pages + 3
    .fill 508, 8, 0
memory_pages:                   /* 0 to 1 GiB, in 2 MiB pages */
    .set page, 0
    .rept 512
    .quad page + 0x83
    .set page, page + 0x200000
    .endr
device_pages:                   /* 3 to 4 GiB: virtio, I/O APIC, local APIC */
    .set page, 0xc0000000
    .rept 512
    .quad page + 0x83
    .set page, page + 0x200000
    .endr

    .bss
    .balign 16
    .skip 32768
stack_end:
sleeper_stack:
    .skip 8

    .section .note.GNU-stack, "", @progbits
