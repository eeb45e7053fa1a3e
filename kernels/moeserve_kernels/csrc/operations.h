/* The operations on whole tensors; all weights and activations bfloat16, contiguous. */
#ifndef MOESERVE_OPERATIONS_H
#define MOESERVE_OPERATIONS_H

#include <stddef.h>
#include <stdint.h>

/* out [num_rows, num_outputs] = x [num_rows, depth] times weight [num_outputs, depth] transposed.
 * Returns 0, or -1 when memory is out. */
int linear(const uint16_t *x, const uint16_t *weight, uint16_t *out, size_t num_rows,
           size_t num_outputs, size_t depth, unsigned num_threads);

typedef struct {
    const uint16_t *hidden_states; /* [num_rows, hidden_size] */
    const uint16_t *w13;           /* [num_slots, 2 * intermediate_size, hidden_size] */
    const uint16_t *w2;            /* [num_slots, hidden_size, intermediate_size] */
    const int64_t *slots;          /* [num_rows, top_k]; -1: the pair is not here */
    const float *topk_weights;     /* [num_rows, top_k]; NULL: pairs go out one by one */
    uint16_t *out;                 /* [num_rows, hidden_size], or of pairs [num_rows, top_k, ..] */
    size_t num_rows, top_k, num_slots, hidden_size, intermediate_size;
    unsigned num_threads;
} MoeArguments;

typedef struct {
    const uint16_t *query;                   /* [num_requests, num_heads, head_dim] */
    const uint16_t *key_cache, *value_cache; /* [num_blocks, block_size, num_kv_heads, head_dim] */
    const int64_t *block_table;              /* [num_requests, max_blocks] */
    const int64_t *seq_lens;                 /* [num_requests], at least 1 */
    uint16_t *out;                           /* as query */
    float scale;
    size_t sliding_window; /* 0: none */
    size_t num_requests, num_heads, num_kv_heads, head_dim, num_blocks, block_size, max_blocks;
    unsigned num_threads;
} DecodeArguments;

/* Attention of one token per request, the last of its sequence.
 * Returns 0, -1 when memory is out, -3 when the block table does not fit. */
int attn_decode(const DecodeArguments *arguments);

/* The experts' feed-forward. Returns 0, -1 when memory is out, -2 when a slot is out of range. */
int moe_ffn(const MoeArguments *arguments);

#endif
