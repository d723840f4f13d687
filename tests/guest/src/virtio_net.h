/* The network card: frames in and out, over virtio's memory-mapped transport. */
#pragma once

#include "text.h"

enum { FRAME_BYTES_MAX = 1514 };

/* Find the card among the devices that the kernel command line lists; false when there is none. */
bool card_start(slice command_line, uint8_t mac[6]);

/* A buffer for the next frame to send; `card_send` sends it. */
uint8_t *card_buffer(void);
void card_send(size_t length);

/* The next frame that came, or NULL; it is ours until `card_release`. */
const uint8_t *card_receive(size_t *length);
void card_release(void);

/* Tell whether a frame waits. */
bool card_waiting(void);

/* Tell the card that its interrupt was seen. */
void card_acknowledge(void);
