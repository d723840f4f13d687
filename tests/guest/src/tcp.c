#include "tcp.h"

#include "machine.h"

enum {
    HEADER_BYTES = 20,
    SEGMENT_BYTES_MAX = IP_PAYLOAD_BYTES_MAX - HEADER_BYTES,
    OUR_WINDOW = 32768, /* half of what the receive ring holds */
    CONNECTIONS_MAX = 4,
    FIN = 1,
    SYN = 2,
    RST = 4,
    PSH = 8,
    ACK = 16,
    TRIES_MAX = 8,
    ARP_TRIES_MAX = 4,
    TRIES_BEFORE_ASKING = 3,
};

static const uint64_t ARP_WAIT_NS = 250 * MS;
static const uint64_t FIRST_WAIT_NS = 200 * MS;
static const uint64_t LONGEST_WAIT_NS = 2000 * MS;

const char *const tcp_end_names[] = {"no-arp", "refused", "unreachable", "timeout", "ended"};

static struct tcp *connections[CONNECTIONS_MAX];

static void transmit(struct tcp *tcp, uint8_t flags, uint32_t sequence, const char *data, size_t length) {
    uint8_t *segment = net_packet();
    size_t header = flags & SYN ? HEADER_BYTES + 4 : HEADER_BYTES;
    put16(segment, tcp->port);
    put16(segment + 2, tcp->peer_port);
    put32(segment + 4, sequence);
    put32(segment + 8, flags & ACK ? tcp->expected : 0);
    put16(segment + 12, (uint16_t)(header / 4 << 12 | flags));
    put16(segment + 14, OUR_WINDOW);
    put32(segment + 16, 0);
    if (flags & SYN) {
        put32(segment + HEADER_BYTES, 0x02040000 | SEGMENT_BYTES_MAX);
    }
    memcpy(segment + header, data, length);
    uint8_t pseudo_header[12];
    put32(pseudo_header, self.ip);
    put32(pseudo_header + 4, tcp->peer);
    put16(pseudo_header + 8, PROTOCOL_TCP);
    put16(pseudo_header + 10, (uint16_t)(header + length));
    uint64_t sum = checksum_add(0, pseudo_header, sizeof pseudo_header);
    *(uint16_t *)(segment + 16) = checksum_end(checksum_add(sum, segment, header + length));
    net_packet_send(tcp->peer_mac, self.mac, self.ip, tcp->peer, PROTOCOL_TCP, header + length);
    tcp->must_acknowledge = false;
}

static void end(struct tcp *tcp, enum tcp_end why) {
    tcp->state = TCP_CLOSED;
    tcp->closed(tcp, why);
}

static void wait_for_answer(struct tcp *tcp, uint64_t wait_ns) {
    tcp->wait_ns = wait_ns;
    tcp->due_ns = now_ns() + wait_ns;
}

static void send_syn(struct tcp *tcp) {
    transmit(tcp, SYN, tcp->acknowledged - 1, "", 0);
}

static void output(struct tcp *tcp) {
    while (tcp->sent < tcp->queued && tcp->sent < tcp->window) {
        size_t length = tcp->queued - tcp->sent;
        length = length < tcp->window - tcp->sent ? length : tcp->window - tcp->sent;
        length = length < SEGMENT_BYTES_MAX ? length : SEGMENT_BYTES_MAX;
        if (tcp->sent == 0) {
            wait_for_answer(tcp, FIRST_WAIT_NS);
        }
        transmit(tcp, ACK | PSH, tcp->acknowledged + (uint32_t)tcp->sent, tcp->queue + tcp->sent, length);
        tcp->sent += length;
    }
    if (tcp->queued > 0 && tcp->sent == 0 && tcp->due_ns == NEVER) {
        wait_for_answer(tcp, LONGEST_WAIT_NS); /* the peer's window is shut: ask for it then */
    }
}

static void try_neighbour(struct tcp *tcp, bool ask) {
    const uint8_t *mac = net_neighbour(tcp->peer, ask);
    if (mac != NULL) {
        memcpy(tcp->peer_mac, mac, 6);
        tcp->state = TCP_OPENING;
        tcp->tries = 0;
        wait_for_answer(tcp, FIRST_WAIT_NS);
        send_syn(tcp);
    }
}

void tcp_open(struct tcp *tcp, uint32_t peer, uint16_t peer_port) {
    int place = 0;
    while (connections[place] != NULL && connections[place] != tcp) {
        place++; /* each owner has one for ever, and they are fewer than places */
    }
    connections[place] = tcp;
    tcp->peer = peer;
    tcp->peer_port = peer_port;
    tcp->port = (uint16_t)(16384 + varied() % 49152);
    tcp->acknowledged = varied();
    tcp->queued = tcp->sent = 0;
    tcp->tries = 0;
    tcp->state = TCP_RESOLVING;
    wait_for_answer(tcp, ARP_WAIT_NS);
    try_neighbour(tcp, true);
}

bool tcp_send(struct tcp *tcp, const void *data, size_t length) {
    if (tcp->state != TCP_OPEN || length > TCP_QUEUE_BYTES_MAX - tcp->queued) {
        return false;
    }
    memcpy(tcp->queue + tcp->queued, data, length);
    tcp->queued += length;
    output(tcp);
    return true;
}

void tcp_close(struct tcp *tcp) {
    if (tcp->state == TCP_OPEN) {
        transmit(tcp, FIN | ACK, tcp->acknowledged + (uint32_t)tcp->sent, "", 0);
    }
    tcp->state = TCP_CLOSED;
}

void tcp_reset(struct tcp *tcp) {
    if (tcp->state == TCP_OPEN) {
        transmit(tcp, RST | ACK, tcp->acknowledged + (uint32_t)tcp->sent, "", 0);
    }
    tcp->state = TCP_CLOSED;
}

static void take_answer_to_syn(struct tcp *tcp, const uint8_t *segment, uint8_t flags) {
    uint32_t confirmed = get32(segment + 8);
    if (flags & RST) {
        if (flags & ACK && confirmed == tcp->acknowledged) {
            end(tcp, TCP_REFUSED);
        }
    } else if ((flags & (SYN | ACK)) == (SYN | ACK) && confirmed == tcp->acknowledged) {
        tcp->expected = get32(segment + 4) + 1;
        tcp->window = get16(segment + 14);
        tcp->state = TCP_OPEN;
        tcp->due_ns = NEVER;
        tcp->must_acknowledge = true;
        tcp->opened(tcp);
    } else if (flags & ACK) {
        /* The peer still holds a connection of whoever had our address and port before: take it down, try again. */
        transmit(tcp, RST, confirmed, "", 0);
        send_syn(tcp);
    }
}

static void take_confirmation(struct tcp *tcp, uint32_t confirmed, uint16_t window) {
    uint32_t fresh = confirmed - tcp->acknowledged;
    tcp->window = window;
    if (fresh > 0 && fresh <= tcp->queued) {
        tcp->acknowledged = confirmed;
        tcp->queued -= fresh;
        tcp->sent = tcp->sent > fresh ? tcp->sent - fresh : 0;
        memmove(tcp->queue, tcp->queue + fresh, tcp->queued);
        tcp->tries = 0;
        if (tcp->sent > 0) {
            wait_for_answer(tcp, FIRST_WAIT_NS);
        } else {
            tcp->due_ns = NEVER;
        }
    }
}

static void take_data(struct tcp *tcp, const uint8_t *segment, size_t header, size_t length, bool fin) {
    uint32_t ahead = tcp->expected - get32(segment + 4); /* bytes of the segment that we had before */
    if (length == 0 && !fin) {
        return;
    }
    tcp->must_acknowledge = true;
    if (ahead > length) {
        return; /* too early or too late: the confirmation tells the peer what we expect */
    }
    tcp->expected += (uint32_t)(length - ahead);
    if (length > ahead) {
        tcp->received(tcp, (const char *)segment + header + ahead, length - ahead);
    }
    if (fin && tcp->state == TCP_OPEN) {
        tcp->expected++;
        tcp_close(tcp);
        end(tcp, TCP_ENDED);
    }
}

static void take(struct tcp *tcp, const uint8_t *segment, size_t length) {
    size_t header = segment[12] / 16u * 4u;
    uint8_t flags = segment[13];
    if (header < HEADER_BYTES || header > length) {
        return;
    }
    if (tcp->state == TCP_OPENING) {
        take_answer_to_syn(tcp, segment, flags);
    } else if (flags & RST) {
        if (get32(segment + 4) == tcp->expected) {
            end(tcp, TCP_ENDED);
        }
    } else if (flags & SYN) {
        tcp->must_acknowledge = true; /* our confirmation of the answer to our SYN was lost */
    } else if (flags & ACK) {
        take_confirmation(tcp, get32(segment + 8), get16(segment + 14));
        take_data(tcp, segment, header, length - header, flags & FIN);
    }
    if (tcp->state == TCP_OPEN) {
        output(tcp);
        if (tcp->must_acknowledge) {
            transmit(tcp, ACK, tcp->acknowledged + (uint32_t)tcp->sent, "", 0);
        }
    }
}

static bool is_of(const struct tcp *tcp, uint32_t peer, uint16_t port, uint16_t peer_port) {
    return tcp != NULL && tcp->state >= TCP_OPENING && tcp->peer == peer && tcp->port == port &&
           tcp->peer_port == peer_port;
}

void tcp_take(uint32_t from, const uint8_t *segment, size_t length) {
    for (int i = 0; i < CONNECTIONS_MAX; i++) {
        if (is_of(connections[i], from, get16(segment + 2), get16(segment))) {
            take(connections[i], segment, length);
            return;
        }
    }
}

void tcp_unreachable(uint32_t peer, uint16_t port, uint16_t peer_port) {
    for (int i = 0; i < CONNECTIONS_MAX; i++) {
        if (is_of(connections[i], peer, port, peer_port) && connections[i]->state == TCP_OPENING) {
            end(connections[i], TCP_UNREACHABLE);
        }
    }
}

void tcp_neighbour_known(void) {
    for (int i = 0; i < CONNECTIONS_MAX; i++) {
        if (connections[i] != NULL && connections[i]->state == TCP_RESOLVING) {
            try_neighbour(connections[i], false);
        }
    }
}

/* The peer, or the gateway before it, may have a new MAC address: look, and after some tries ask. */
static void look_for_peer_again(struct tcp *tcp) {
    if (tcp->tries == TRIES_BEFORE_ASKING) {
        net_forget_neighbour(tcp->peer);
    }
    const uint8_t *mac = net_neighbour(tcp->peer, true);
    if (mac != NULL) {
        memcpy(tcp->peer_mac, mac, 6);
    }
}

static void send_again(struct tcp *tcp) {
    int tries_max = tcp->state == TCP_RESOLVING ? ARP_TRIES_MAX : TRIES_MAX;
    if (++tcp->tries >= tries_max) {
        end(tcp, tcp->state == TCP_RESOLVING ? TCP_NO_ARP : TCP_TIMEOUT);
    } else if (tcp->state == TCP_RESOLVING) {
        wait_for_answer(tcp, ARP_WAIT_NS);
        try_neighbour(tcp, true);
    } else {
        look_for_peer_again(tcp);
        uint64_t wait_ns = tcp->wait_ns * 2 < LONGEST_WAIT_NS ? tcp->wait_ns * 2 : LONGEST_WAIT_NS;
        if (tcp->state == TCP_OPENING) {
            send_syn(tcp);
        } else {
            tcp->sent = 0;
            tcp->window = tcp->window > 0 ? tcp->window : 1; /* a shut window is asked for with one byte */
            output(tcp);
        }
        wait_for_answer(tcp, wait_ns);
    }
}

void tcp_tick(uint64_t now) {
    for (int i = 0; i < CONNECTIONS_MAX; i++) {
        struct tcp *tcp = connections[i];
        if (tcp != NULL && tcp->state != TCP_CLOSED && tcp->due_ns <= now) {
            send_again(tcp);
        }
    }
}

uint64_t tcp_due(void) {
    uint64_t due = NEVER;
    for (int i = 0; i < CONNECTIONS_MAX; i++) {
        struct tcp *tcp = connections[i];
        if (tcp != NULL && tcp->state != TCP_CLOSED && tcp->due_ns < due) {
            due = tcp->due_ns;
        }
    }
    return due;
}
