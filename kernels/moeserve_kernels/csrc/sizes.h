/* Two small functions on sizes. */
#ifndef MOESERVE_SIZES_H
#define MOESERVE_SIZES_H

#include <stddef.h>

/* Blocks of `size` that hold `count`; the last may be partial. */
static inline size_t blocks(size_t count, size_t size) { return (count + size - 1) / size; }

static inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

#endif
