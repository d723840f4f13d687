/* TCP for clients: a few connections, segments in order, retransmission. */
#pragma once

#include "net.h"

enum { TCP_QUEUE_BYTES_MAX = 16384 };

enum tcp_state { TCP_CLOSED, TCP_RESOLVING, TCP_OPENING, TCP_OPEN };

/* Why a connection is over. */
enum tcp_end { TCP_NO_ARP, TCP_REFUSED, TCP_UNREACHABLE, TCP_TIMEOUT, TCP_ENDED };

extern const char *const tcp_end_names[];

struct tcp {
    /* What the owner is told; `closed` is the last and may open again. */
    void (*opened)(struct tcp *);
    void (*received)(struct tcp *, const char *, size_t);
    void (*closed)(struct tcp *, enum tcp_end);

    enum tcp_state state;
    uint32_t peer;
    uint16_t peer_port, port;
    uint8_t peer_mac[6];
    uint32_t acknowledged; /* the first sequence number that the peer has not confirmed */
    uint32_t expected;     /* the next one that we expect */
    uint32_t window;       /* how much the peer takes */
    bool must_acknowledge;
    int tries;
    uint64_t wait_ns, due_ns; /* when what was sent is sent again */
    size_t queued, sent;      /* bytes in the queue; of them, on their way */
    char queue[TCP_QUEUE_BYTES_MAX];
};

void tcp_open(struct tcp *tcp, uint32_t peer, uint16_t peer_port);

/* Queue bytes and send what the peer takes; false, and nothing queued, when there is no room. */
bool tcp_send(struct tcp *tcp, const void *data, size_t length);

/* End it without waiting and without being told: in good order, or with a reset. */
void tcp_close(struct tcp *tcp);
void tcp_reset(struct tcp *tcp);

/* Send again what was not confirmed in time, or give up. */
void tcp_tick(uint64_t now);

/* When `tcp_tick` is needed next. */
uint64_t tcp_due(void);

/* From the floor below. */
void tcp_take(uint32_t from, const uint8_t *segment, size_t length);
void tcp_neighbour_known(void);
void tcp_unreachable(uint32_t peer, uint16_t port, uint16_t peer_port);
