#include "net.h"

#include "machine.h"
#include "tcp.h"

enum {
    ETHERNET_BYTES = 14,
    IP_BYTES = 20,
    ARP_BYTES = 28,
    TYPE_IP = 0x0800,
    TYPE_ARP = 0x0806,
    ARP_REQUEST = 1,
    ARP_REPLY = 2,
    ECHO_REPLY = 0,
    UNREACHABLE = 3,
    ECHO_REQUEST = 8,
    NEIGHBOURS_MAX = 8,
};

static const uint64_t NEIGHBOUR_LASTS_NS = 30000 * MS;
static const uint8_t EVERYBODY[6] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff};

struct address self;

static struct {
    uint32_t ip;
    uint8_t mac[6];
    uint64_t until_ns;
} neighbours[NEIGHBOURS_MAX];
static int oldest_neighbour;

uint64_t checksum_add(uint64_t sum, const void *data, size_t length) {
    const uint8_t *at = data;
    /* Words of 32 bits into 64: nothing is lost, and the end folds it. Byte order does not matter to the sum. */
    for (; length >= 4; length -= 4, at += 4) {
        sum += *(const uint32_t *)at;
    }
    if (length >= 2) {
        sum += *(const uint16_t *)at;
        at += 2;
        length -= 2;
    }
    return length > 0 ? sum + *at : sum;
}

uint16_t checksum_end(uint64_t sum) {
    while (sum >> 16) {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    return (uint16_t)~sum;
}

static void send_frame(const uint8_t *to, const uint8_t *from, uint16_t type, size_t payload_bytes) {
    uint8_t *frame = card_buffer();
    memcpy(frame, to, 6);
    memcpy(frame + 6, from, 6);
    put16(frame + 12, type);
    card_send(ETHERNET_BYTES + payload_bytes);
}

static void send_arp(uint16_t operation, const uint8_t *to_mac, uint32_t from, uint32_t to) {
    uint8_t *arp = card_buffer() + ETHERNET_BYTES;
    put16(arp, 1);
    put16(arp + 2, TYPE_IP);
    arp[4] = 6;
    arp[5] = 4;
    put16(arp + 6, operation);
    memcpy(arp + 8, self.mac, 6);
    put32(arp + 14, from);
    memcpy(arp + 18, to_mac, 6);
    put32(arp + 24, to);
    send_frame(to_mac, self.mac, TYPE_ARP, ARP_BYTES);
}

void net_claim(uint32_t ip) {
    send_arp(ARP_REPLY, EVERYBODY, ip, ip);
}

static bool on_link(uint32_t ip) {
    /* 169.254.0.0/16 always is: Firecracker answers for the metadata address itself. */
    return ((ip ^ self.ip) & self.mask) == 0 || ip >> 16 == 0xa9fe;
}

const uint8_t *net_neighbour(uint32_t ip, bool ask) {
    uint32_t next = on_link(ip) ? ip : self.gateway;
    uint64_t now = now_ns();
    for (int i = 0; i < NEIGHBOURS_MAX; i++) {
        if (neighbours[i].ip == next && neighbours[i].until_ns > now) {
            return neighbours[i].mac;
        }
    }
    if (ask) {
        send_arp(ARP_REQUEST, EVERYBODY, self.ip, next);
    }
    return NULL;
}

void net_forget_neighbour(uint32_t ip) {
    uint32_t next = on_link(ip) ? ip : self.gateway;
    for (int i = 0; i < NEIGHBOURS_MAX; i++) {
        if (neighbours[i].ip == next) {
            neighbours[i].until_ns = 0;
        }
    }
}

/* `known_only`: take a new MAC address of somebody we know, but do not get to know anybody. */
static void learn(uint32_t ip, const uint8_t *mac, bool known_only) {
    int place = NEIGHBOURS_MAX;
    for (int i = 0; i < NEIGHBOURS_MAX; i++) {
        if (neighbours[i].ip == ip) {
            place = i;
        }
    }
    if (place == NEIGHBOURS_MAX && known_only) {
        return;
    }
    if (place == NEIGHBOURS_MAX) {
        place = oldest_neighbour;
        oldest_neighbour = (oldest_neighbour + 1) % NEIGHBOURS_MAX;
    }
    neighbours[place].ip = ip;
    memcpy(neighbours[place].mac, mac, 6);
    neighbours[place].until_ns = now_ns() + NEIGHBOUR_LASTS_NS;
    tcp_neighbour_known();
}

static void take_arp(const uint8_t *arp) {
    uint32_t sender = get32(arp + 14), target = get32(arp + 24);
    bool is_request = get16(arp + 6) == ARP_REQUEST;
    if (get16(arp + 2) != TYPE_IP || sender == 0) {
        return;
    }
    learn(sender, arp + 8, is_request || target != self.ip);
    if (is_request && target == self.ip) {
        send_arp(ARP_REPLY, arp + 8, self.ip, sender);
    }
}

uint8_t *net_packet(void) {
    return card_buffer() + ETHERNET_BYTES + IP_BYTES;
}

void net_packet_send(const uint8_t *to_mac, const uint8_t *from_mac, uint32_t from, uint32_t to, uint8_t protocol,
                     size_t length) {
    uint8_t *ip = card_buffer() + ETHERNET_BYTES;
    put16(ip, 0x4500);
    put16(ip + 2, (uint16_t)(IP_BYTES + length));
    put32(ip + 4, 0x4000); /* no identification; do not fragment */
    ip[8] = 64;
    ip[9] = protocol;
    put16(ip + 10, 0);
    put32(ip + 12, from);
    put32(ip + 16, to);
    *(uint16_t *)(ip + 10) = checksum_end(checksum_add(0, ip, IP_BYTES));
    send_frame(to_mac, from_mac, TYPE_IP, IP_BYTES + length);
}

static void send_echo(uint8_t kind, const uint8_t *to_mac, const uint8_t *from_mac, uint32_t from, uint32_t to,
                      const uint8_t *rest, size_t length) {
    uint8_t *icmp = net_packet();
    memcpy(icmp + 4, rest, length - 4);
    put32(icmp, (uint32_t)kind << 24);
    *(uint16_t *)(icmp + 2) = checksum_end(checksum_add(0, icmp, length));
    net_packet_send(to_mac, from_mac, from, to, PROTOCOL_ICMP, length);
}

bool net_forged_ping(const uint8_t *from_mac, uint32_t from) {
    static const uint8_t rest[12] = {'f', 'l', 0, 1, 'f', 'o', 'r', 'g', 'e', 'd'};
    const uint8_t *to_mac = net_neighbour(self.gateway, true);
    if (to_mac == NULL) {
        return false;
    }
    send_echo(ECHO_REQUEST, to_mac, from_mac, from, self.gateway, rest, 16);
    return true;
}

static void take_icmp(const uint8_t *ethernet, const uint8_t *ip, const uint8_t *icmp, size_t length) {
    if (icmp[0] == ECHO_REQUEST && length >= 8) {
        send_echo(ECHO_REPLY, ethernet + 6, self.mac, self.ip, get32(ip + 12), icmp + 4, length);
    } else if (icmp[0] == UNREACHABLE && length >= 8 + IP_BYTES + 4) {
        const uint8_t *ours = icmp + 8; /* the packet that could not get there */
        if (ours[9] == PROTOCOL_TCP) {
            tcp_unreachable(get32(ours + 16), get16(ours + IP_BYTES), get16(ours + IP_BYTES + 2));
        }
    }
}

static void take_ip(const uint8_t *ethernet, const uint8_t *ip, size_t frame_bytes) {
    size_t header = (ip[0] & 15u) * 4u, total = get16(ip + 2);
    bool fragment = get16(ip + 6) & 0x3fff;
    /* Checksums are not looked at: what comes crossed no wire, and a wrong byte would be a bug of the host's. */
    if (ip[0] >> 4 != 4 || header < IP_BYTES || total < header || total > frame_bytes || fragment ||
        get32(ip + 16) != self.ip) {
        return;
    }
    if (ip[9] == PROTOCOL_TCP && total - header >= 20) {
        tcp_take(get32(ip + 12), ip + header, total - header);
    } else if (ip[9] == PROTOCOL_ICMP && total - header >= 4) {
        take_icmp(ethernet, ip, ip + header, total - header);
    }
}

void net_poll(void) {
    size_t length;
    const uint8_t *frame;
    if (!card_waiting()) {
        return;
    }
    card_acknowledge();
    while ((frame = card_receive(&length)) != NULL) {
        uint16_t type = length >= ETHERNET_BYTES + ARP_BYTES ? get16(frame + 12) : 0;
        if (type == TYPE_ARP) {
            take_arp(frame + ETHERNET_BYTES);
        } else if (type == TYPE_IP) {
            take_ip(frame, frame + ETHERNET_BYTES, length - ETHERNET_BYTES);
        }
        card_release();
    }
}

static uint32_t mask_of(uint32_t bits) {
    return bits == 0 ? 0 : 0xffffffffu << (32 - (bits > 32 ? 32 : bits));
}

/* Linux's own form, ip=CLIENT:SERVER:GATEWAY:NETMASK:HOST:DEVICE:AUTOCONF; the rest is not ours. */
static bool parse_linux_form(slice value) {
    slice client = cut(&value, ':');
    cut(&value, ':');
    slice gateway = cut(&value, ':'), mask = cut(&value, ':');
    return parse_ip(client, &self.ip) && parse_ip(gateway, &self.gateway) && parse_ip(mask, &self.mask);
}

static bool parse_address(slice command_line) {
    bool ip = false, gateway = false;
    while (command_line.length > 0) {
        slice value = cut(&command_line, ' '), name = cut(&value, '=');
        if (slice_is(name, "ip")) {
            ip = gateway = parse_linux_form(value);
        } else if (slice_is(name, "fleetlog.ip")) {
            slice address = cut(&value, '/');
            ip = parse_ip(address, &self.ip);
            self.mask = mask_of(value.length > 0 ? number(value) : 24);
        } else if (slice_is(name, "fleetlog.gw")) {
            gateway = parse_ip(value, &self.gateway);
        }
    }
    return ip && gateway;
}

bool net_start(slice command_line) {
    if (!parse_address(command_line)) {
        say("no address: the kernel command line must say fleetlog.ip=A.B.C.D/BITS fleetlog.gw=A.B.C.D, or Linux's ip=");
        return false;
    }
    if (!card_start(command_line, self.mac)) {
        say("no network card: the machine has no network interface");
        return false;
    }
    return true;
}
