/* Attention of decoding requests over the paged cache: a task is one request and one kv head.
 *
 * The query heads that share a kv head are rows of one product, so keys and values are read once,
 * in bfloat16, where they lie. Softmax runs online over chunks of tokens (Milakov and Gimelshein,
 * 2018): the sums are scaled down whenever a larger score turns up. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "bf16_matmul.h"
#include "operations.h"
#include "parallel.h"
#include "sizes.h"

#define CHUNK 64 /* tokens between two looks at the largest score */

/* The state of the query heads of one task; each pointer has `group` elements or rows. */
typedef struct {
    size_t group;
    float **query; /* rows of head_dim, split */
    float **sums;  /* rows of head_dim, split: values weighted by exp(score - peak) */
    float *peaks, *totals;
    float *scores; /* [group, CHUNK] */
} Heads;

static int allocate_heads(Heads *heads, size_t group, size_t head_dim) {
    const size_t numbers = 2 * group * head_dim + group * (2 + CHUNK);
    float *memory = malloc(numbers * sizeof(float));
    heads->query = malloc(2 * group * sizeof(float *));
    if (memory == NULL || heads->query == NULL) {
        free(memory);
        free(heads->query);
        return -1;
    }
    heads->group = group;
    heads->sums = heads->query + group;
    for (size_t head = 0; head < group; head++) {
        heads->query[head] = memory + head * head_dim;
        heads->sums[head] = memory + (group + head) * head_dim;
    }
    heads->peaks = memory + 2 * group * head_dim;
    heads->totals = heads->peaks + group;
    heads->scores = heads->totals + group;
    return 0;
}

static void release_heads(Heads *heads) {
    free(heads->query[0]); /* one piece of memory */
    free(heads->query);
}

static void start_heads(const DecodeArguments *a, size_t request, size_t kv_head, Heads *heads) {
    const size_t first = request * a->num_heads + kv_head * heads->group;
    for (size_t head = 0; head < heads->group; head++) {
        split_bf16_row(a->query + (first + head) * a->head_dim, a->head_dim, heads->query[head]);
        for (size_t k = 0; k < a->head_dim; k++) {
            heads->query[head][k] *= a->scale;
            heads->sums[head][k] = 0;
        }
        heads->peaks[head] = -INFINITY;
        heads->totals[head] = 0;
    }
}

/* Where the keys or values of one kv head lie for tokens that follow each other in one block. */
static Bf16Rows cached(const DecodeArguments *a, const uint16_t *cache, size_t request,
                       size_t kv_head, size_t token, size_t end) {
    const size_t block = (size_t)a->block_table[request * a->max_blocks + token / a->block_size];
    const size_t offset = token % a->block_size;
    const size_t row = (block * a->block_size + offset) * a->num_kv_heads + kv_head;
    return (Bf16Rows){cache + row * a->head_dim, smaller(a->block_size - offset, end - token),
                      a->num_kv_heads * a->head_dim};
}

/* Turns the scores of a chunk into weights, relative to the largest score so far. */
static void weigh(const DecodeArguments *a, Heads *heads, size_t count) {
    const size_t padded = (count + 7) / 8 * 8;
    for (size_t head = 0; head < heads->group; head++) {
        float *scores = heads->scores + head * CHUNK, peak = heads->peaks[head];
        for (size_t i = 0; i < count; i++) peak = scores[i] > peak ? scores[i] : peak;
        for (size_t i = count; i < padded; i++) scores[i] = -INFINITY;
        const float shrink = peak > heads->peaks[head] ? expf(heads->peaks[head] - peak) : 1;
        for (size_t k = 0; shrink != 1 && k < a->head_dim; k++) heads->sums[head][k] *= shrink;
        heads->totals[head] = heads->totals[head] * shrink + exponentials(scores, padded, peak);
        heads->peaks[head] = peak;
    }
}

static void attend_chunk(const DecodeArguments *a, size_t request, size_t kv_head, Heads *heads,
                         size_t start, size_t end) {
    for (size_t token = start; token < end;) {
        const Bf16Rows keys = cached(a, a->key_cache, request, kv_head, token, end);
        bf16_matmul((const float *const *)heads->query, heads->group, keys, a->head_dim,
                    heads->scores + (token - start), CHUNK);
        token += keys.count;
    }
    weigh(a, heads, end - start);
    for (size_t token = start; token < end;) {
        const Bf16Rows values = cached(a, a->value_cache, request, kv_head, token, end);
        bf16_weighted_sum(heads->scores + (token - start), CHUNK, heads->group, values,
                          a->head_dim, heads->sums);
        token += values.count;
    }
}

typedef struct {
    const DecodeArguments *arguments;
    atomic_int failed; /* a task got no memory */
} Work;

static void attend(void *context, size_t index) {
    Work *work = context;
    const DecodeArguments *a = work->arguments;
    const size_t request = index / a->num_kv_heads, kv_head = index % a->num_kv_heads;
    const size_t length = (size_t)a->seq_lens[request];
    const int is_cut = a->sliding_window > 0 && a->sliding_window < length;
    Heads heads;
    if (allocate_heads(&heads, a->num_heads / a->num_kv_heads, a->head_dim) != 0) {
        work->failed = 1;
        return;
    }
    start_heads(a, request, kv_head, &heads);
    for (size_t start = is_cut ? length - a->sliding_window : 0; start < length; start += CHUNK)
        attend_chunk(a, request, kv_head, &heads, start, smaller(start + CHUNK, length));
    for (size_t head = 0; head < heads.group; head++) {
        const size_t row = request * a->num_heads + kv_head * heads.group + head;
        join_bf16_row(heads.sums[head], 1 / heads.totals[head], a->head_dim,
                      a->out + row * a->head_dim);
    }
    release_heads(&heads);
}

static int blocks_are_valid(const DecodeArguments *a) {
    for (size_t request = 0; request < a->num_requests; request++) {
        const int64_t length = a->seq_lens[request];
        if (length < 1 || (uint64_t)length > a->max_blocks * a->block_size) return 0;
        for (size_t i = 0; i * a->block_size < (size_t)length; i++) {
            const int64_t block = a->block_table[request * a->max_blocks + i];
            if (block < 0 || (uint64_t)block >= a->num_blocks) return 0;
        }
    }
    return 1;
}

int attn_decode(const DecodeArguments *arguments) {
    Work work = {.arguments = arguments};
    atomic_init(&work.failed, 0);
    if (!blocks_are_valid(arguments)) return -3;
    run_tasks(attend, &work, arguments->num_requests * arguments->num_kv_heads,
              arguments->num_threads);
    return work.failed ? -1 : 0;
}
