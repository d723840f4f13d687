/* Ethernet, ARP, IPv4 and ICMP echo. Addresses are in host order. */
#pragma once

#include "virtio_net.h"

enum { PROTOCOL_ICMP = 1, PROTOCOL_TCP = 6, PROTOCOL_UDP = 17, IP_PAYLOAD_BYTES_MAX = 1480 };

struct address {
    uint8_t mac[6];
    uint32_t ip, mask, gateway;
};

/* Who we are on the network. */
extern struct address self;

/* Bring the card up and take our address from the kernel command line; false and a line said when that fails. */
bool net_start(slice command_line);

/* Take in every frame that waits. */
void net_poll(void);

/* The MAC address behind which an IP address is reached; NULL when not known, and it is asked for with `ask`. */
const uint8_t *net_neighbour(uint32_t ip, bool ask);

/* Ask anew the next time: nothing comes back from there. */
void net_forget_neighbour(uint32_t ip);

/* Begin a packet: the place for its payload. `net_packet_send` sends it from `source` as `mac`. */
uint8_t *net_packet(void);
void net_packet_send(const uint8_t *to_mac, const uint8_t *from_mac, uint32_t from, uint32_t to, uint8_t protocol,
                     size_t length);

/* Tell everybody on the segment that an IP address is ours. */
void net_claim(uint32_t ip);

/* Send an echo request to the gateway in whoever's name; false when the gateway's MAC address is not known. */
bool net_forged_ping(const uint8_t *from_mac, uint32_t from);

/* The Internet checksum; `start` is what was summed before, not inverted. */
uint64_t checksum_add(uint64_t start, const void *data, size_t length);
uint16_t checksum_end(uint64_t sum);

static inline uint16_t get16(const uint8_t *at) {
    return (uint16_t)(at[0] << 8 | at[1]);
}

static inline uint32_t get32(const uint8_t *at) {
    return __builtin_bswap32(*(const uint32_t *)at);
}

static inline void put16(uint8_t *at, uint16_t value) {
    *(uint16_t *)at = __builtin_bswap16(value);
}

static inline void put32(uint8_t *at, uint32_t value) {
    *(uint32_t *)at = __builtin_bswap32(value);
}
