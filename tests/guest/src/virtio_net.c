#include "virtio_net.h"

#include "machine.h"

/* Registers of virtio 1.2, section 4.2.2. */
enum {
    MAGIC = 0x000,
    DEVICE_ID = 0x008,
    DRIVER_FEATURES = 0x020,
    DRIVER_FEATURES_SELECT = 0x024,
    QUEUE_SELECT = 0x030,
    QUEUE_SIZE = 0x038,
    QUEUE_READY = 0x044,
    QUEUE_NOTIFY = 0x050,
    INTERRUPT_ACKNOWLEDGE = 0x064,
    STATUS = 0x070,
    QUEUE_DESCRIPTORS = 0x080,
    QUEUE_OFFERED = 0x090,
    QUEUE_USED = 0x0a0,
    CONFIGURATION = 0x100,
};

enum {
    VIRTIO_MAGIC = 0x74726976,
    NETWORK_CARD = 1,
    DEVICE_WRITES = 2,
    FEATURE_MAC = 1 << 5,
    FEATURE_VERSION_1 = 1 << 0, /* of the upper 32 */
    RECEIVE = 0,
    SEND = 1,
    HEADER_BYTES = 12,
    BUFFER_BYTES = 2048,
    /* Firecracker delivers nothing while the ring offers less than 65,562 bytes: twice that, so that the frames we
     * have not given back yet never stop the next one. */
    RING_SIZE = 64,
};

struct descriptor {
    uint64_t address;
    uint32_t length;
    uint16_t flags, next;
};

struct ring {
    struct descriptor descriptors[RING_SIZE] __attribute__((aligned(16)));
    struct {
        uint16_t flags;
        volatile uint16_t end;
        uint16_t entries[RING_SIZE];
    } offered __attribute__((aligned(4)));
    struct {
        uint16_t flags;
        volatile uint16_t end;
        struct {
            uint32_t descriptor, length;
        } entries[RING_SIZE];
    } used __attribute__((aligned(4)));
    uint16_t seen; /* of `used` */
};

static struct ring rings[2];
static uint8_t buffers[2][RING_SIZE][BUFFER_BYTES] __attribute__((aligned(4096)));
static uintptr_t card;

/* Devices are announced as virtio_mmio.device=4K@0xd0000000:5 (size, address, interrupt line). */
static uintptr_t parse_hex(slice text) {
    uintptr_t value = 0;
    for (size_t i = 2; i < text.length; i++) {
        char digit = text.at[i];
        value = value << 4 | (uintptr_t)(digit <= '9' ? digit - '0' : (digit | 0x20) - 'a' + 10);
    }
    return value;
}

static bool find_card(slice command_line, int *line) {
    while (command_line.length > 0) {
        slice word = cut(&command_line, ' ');
        if (!slice_starts(word, "virtio_mmio.device=")) {
            continue;
        }
        cut(&word, '@');
        card = parse_hex(cut(&word, ':'));
        *line = (int)number(word);
        if (device_read(card + MAGIC) == VIRTIO_MAGIC && device_read(card + DEVICE_ID) == NETWORK_CARD) {
            return true;
        }
    }
    return false;
}

static void set_address(uint32_t low_register, const volatile void *address) {
    device_write(card + low_register, (uint32_t)(uintptr_t)address);
    device_write(card + low_register + 4, (uint32_t)((uintptr_t)address >> 32));
}

static void start_ring(uint32_t which) {
    struct ring *ring = &rings[which];
    for (uint16_t i = 0; i < RING_SIZE; i++) {
        ring->descriptors[i].address = (uintptr_t)buffers[which][i];
        ring->descriptors[i].length = BUFFER_BYTES;
        ring->descriptors[i].flags = which == RECEIVE ? DEVICE_WRITES : 0;
        ring->offered.entries[i] = i; /* for ever: a buffer is given back in the place where it came from */
    }
    device_write(card + QUEUE_SELECT, which);
    device_write(card + QUEUE_SIZE, RING_SIZE);
    set_address(QUEUE_DESCRIPTORS, ring->descriptors);
    set_address(QUEUE_OFFERED, &ring->offered);
    set_address(QUEUE_USED, &ring->used);
    device_write(card + QUEUE_READY, 1);
}

bool card_start(slice command_line, uint8_t mac[6]) {
    int line;
    if (!find_card(command_line, &line)) {
        return false;
    }
    /* One bit at a time: Firecracker takes no other order. */
    device_write(card + STATUS, 0);
    device_write(card + STATUS, 1);
    device_write(card + STATUS, 3);
    device_write(card + DRIVER_FEATURES_SELECT, 0);
    device_write(card + DRIVER_FEATURES, FEATURE_MAC);
    device_write(card + DRIVER_FEATURES_SELECT, 1);
    device_write(card + DRIVER_FEATURES, FEATURE_VERSION_1);
    device_write(card + STATUS, 11);
    start_ring(RECEIVE);
    start_ring(SEND);
    device_write(card + STATUS, 15);
    for (int i = 0; i < 6; i++) {
        mac[i] = *(volatile uint8_t *)(card + CONFIGURATION + (uintptr_t)i);
    }
    wake_on_line(line);
    barrier();
    rings[RECEIVE].offered.end = RING_SIZE;
    barrier();
    device_write(card + QUEUE_NOTIFY, RECEIVE);
    return true;
}

uint8_t *card_buffer(void) {
    struct ring *ring = &rings[SEND];
    while ((uint16_t)(ring->offered.end - ring->used.end) >= RING_SIZE) {
        barrier(); /* Firecracker takes frames on a thread of its own: this is short and ends */
    }
    return buffers[SEND][ring->offered.end % RING_SIZE] + HEADER_BYTES;
}

void card_send(size_t length) {
    struct ring *ring = &rings[SEND];
    uint16_t place = ring->offered.end % RING_SIZE;
    /* The header before the frame stays as it was made, all zeros: no offloads. */
    ring->descriptors[place].length = (uint32_t)length + HEADER_BYTES;
    barrier();
    ring->offered.end++;
    barrier();
    device_write(card + QUEUE_NOTIFY, SEND);
}

bool card_waiting(void) {
    return rings[RECEIVE].seen != rings[RECEIVE].used.end;
}

const uint8_t *card_receive(size_t *length) {
    struct ring *ring = &rings[RECEIVE];
    if (!card_waiting()) {
        return NULL;
    }
    barrier();
    uint16_t place = ring->seen % RING_SIZE;
    *length = ring->used.entries[place].length - HEADER_BYTES;
    return buffers[RECEIVE][ring->used.entries[place].descriptor] + HEADER_BYTES;
}

void card_release(void) {
    struct ring *ring = &rings[RECEIVE];
    /* Buffers are taken in order, so this one's place comes round again with the same buffer. */
    ring->seen++;
    barrier();
    ring->offered.end++;
    if (ring->offered.end % (RING_SIZE / 4) == 0) {
        barrier();
        device_write(card + QUEUE_NOTIFY, RECEIVE); /* seldom: what is offered still is more than it asks for */
    }
}

void card_acknowledge(void) {
    device_write(card + INTERRUPT_ACKNOWLEDGE, 1);
}
