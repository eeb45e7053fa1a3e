/* The experts' feed-forward in three rounds of tasks: gate and up with their product, down, sum.
 *
 * Pairs of (row, expert) are sorted by expert, so that a weight is read once for all its rows. A
 * task is a block of one expert's outputs. Between gate-up and down nothing is rounded. */
#include <stdlib.h>
#include <string.h>

#include "bf16_matmul.h"
#include "operations.h"
#include "parallel.h"
#include "sizes.h"

#define UP_BLOCK 64 /* gate outputs, and as many up outputs, of one task */
#define DOWN_BLOCK 96
#define ROW_BLOCK 64
#define SUM_BLOCK 256
#define FEW_ROWS 16 /* work on the activations of fewer rows is not worth a fork */

typedef struct {
    const MoeArguments *arguments;
    size_t num_pairs;      /* that are here */
    size_t num_groups;     /* experts with rows */
    size_t *group_slots;   /* [num_groups] */
    size_t *group_starts;  /* [num_groups + 1], first pair of each */
    ptrdiff_t *places;     /* [num_rows * top_k]: the pair's place in sorted order, -1: not here */
    float *hidden;         /* [num_rows, hidden_size], split */
    const float **inputs;  /* [num_pairs], rows of hidden */
    float *activations;    /* [num_pairs, intermediate_size], split */
    const float **middles; /* [num_pairs], rows of activations */
    float *results;        /* [num_pairs, hidden_size] */
} Layer;

static void widen_row(void *context, size_t row) {
    const Layer *layer = context;
    const size_t width = layer->arguments->hidden_size;
    split_bf16_row(layer->arguments->hidden_states + row * width, width,
                   layer->hidden + row * width);
}

static void gate_and_up(void *context, size_t index) {
    const Layer *layer = context;
    const MoeArguments *a = layer->arguments;
    const size_t per_group = blocks(a->intermediate_size, UP_BLOCK);
    const size_t group = index / per_group, first = index % per_group * UP_BLOCK;
    const size_t count = smaller(UP_BLOCK, a->intermediate_size - first);
    const size_t gate_row = layer->group_slots[group] * 2 * a->intermediate_size + first;
    const Bf16Rows gate_weight = {a->w13 + gate_row * a->hidden_size, count, a->hidden_size};
    Bf16Rows up_weight = gate_weight;
    up_weight.first += a->intermediate_size * a->hidden_size;
    float gate[ROW_BLOCK * UP_BLOCK], up[ROW_BLOCK * UP_BLOCK];
    const size_t end = layer->group_starts[group + 1];
    for (size_t pair = layer->group_starts[group]; pair < end; pair += ROW_BLOCK) {
        const size_t height = smaller(ROW_BLOCK, end - pair);
        const float *const *rows = layer->inputs + pair;
        bf16_matmul(rows, height, gate_weight, a->hidden_size, gate, UP_BLOCK);
        bf16_matmul(rows, height, up_weight, a->hidden_size, up, UP_BLOCK);
        for (size_t m = 0; m < height; m++)
            split_silu_mul(gate + m * UP_BLOCK, up + m * UP_BLOCK, count,
                           layer->activations + (pair + m) * a->intermediate_size + first);
    }
}

static void down(void *context, size_t index) {
    const Layer *layer = context;
    const MoeArguments *a = layer->arguments;
    const size_t per_group = blocks(a->hidden_size, DOWN_BLOCK);
    const size_t group = index / per_group, first = index % per_group * DOWN_BLOCK;
    const size_t start = layer->group_starts[group];
    const size_t row = layer->group_slots[group] * a->hidden_size + first;
    const Bf16Rows weight = {a->w2 + row * a->intermediate_size,
                             smaller(DOWN_BLOCK, a->hidden_size - first), a->intermediate_size};
    bf16_matmul(layer->middles + start, layer->group_starts[group + 1] - start, weight,
                a->intermediate_size, layer->results + start * a->hidden_size + first,
                a->hidden_size);
}

static void sum_row(void *context, size_t row) {
    const Layer *layer = context;
    const MoeArguments *a = layer->arguments;
    for (size_t first = 0; first < a->hidden_size; first += SUM_BLOCK) {
        const size_t count = smaller(SUM_BLOCK, a->hidden_size - first);
        float sum[SUM_BLOCK] = {0};
        for (size_t choice = row * a->top_k; choice < (row + 1) * a->top_k; choice++) {
            if (layer->places[choice] < 0) continue;
            const size_t place = (size_t)layer->places[choice];
            add_scaled(layer->results + place * a->hidden_size + first, a->topk_weights[choice],
                       count, sum);
        }
        round_to_bf16(sum, count, a->out + row * a->hidden_size + first);
    }
}

static void write_pairs(void *context, size_t row) {
    const Layer *layer = context;
    const MoeArguments *a = layer->arguments;
    for (size_t choice = row * a->top_k; choice < (row + 1) * a->top_k; choice++) {
        uint16_t *out = a->out + choice * a->hidden_size;
        if (layer->places[choice] < 0)
            memset(out, 0, a->hidden_size * sizeof *out);
        else
            round_to_bf16(layer->results + (size_t)layer->places[choice] * a->hidden_size,
                          a->hidden_size, out);
    }
}

/* Counts pairs per slot into starts[slot + 1]; returns 0, or -2 at a slot out of range. */
static int count_pairs(const MoeArguments *a, size_t *starts) {
    for (size_t choice = 0; choice < a->num_rows * a->top_k; choice++) {
        const int64_t slot = a->slots[choice];
        if (slot < -1 || slot >= (int64_t)a->num_slots) return -2;
        if (slot >= 0) starts[slot + 1]++;
    }
    return 0;
}

/* Sorts the pairs by slot, in a slot by row. `starts` holds counts, as above. */
static void sort_pairs(Layer *layer, size_t *starts) {
    const MoeArguments *a = layer->arguments;
    layer->group_starts[0] = 0;
    for (size_t slot = 0; slot < a->num_slots; slot++) {
        if (starts[slot + 1] > 0) {
            layer->group_slots[layer->num_groups++] = slot;
            layer->group_starts[layer->num_groups] = starts[slot] + starts[slot + 1];
        }
        starts[slot + 1] += starts[slot];
    }
    layer->num_pairs = starts[a->num_slots];
    for (size_t choice = 0; choice < a->num_rows * a->top_k; choice++) {
        const int64_t slot = a->slots[choice];
        layer->places[choice] = slot < 0 ? -1 : (ptrdiff_t)starts[slot]++;
    }
}

static int allocate_sorting(Layer *layer) {
    const MoeArguments *a = layer->arguments;
    layer->group_slots = malloc((a->num_slots + 1) * sizeof *layer->group_slots);
    layer->group_starts = malloc((a->num_slots + 1) * sizeof *layer->group_starts);
    layer->places = malloc(a->num_rows * a->top_k * sizeof *layer->places + 1);
    return layer->group_slots && layer->group_starts && layer->places ? 0 : -1;
}

static int allocate_rows(Layer *layer) {
    const MoeArguments *a = layer->arguments;
    layer->hidden = malloc(a->num_rows * a->hidden_size * sizeof(float) + 1);
    layer->activations = malloc(layer->num_pairs * a->intermediate_size * sizeof(float) + 1);
    layer->results = malloc(layer->num_pairs * a->hidden_size * sizeof(float) + 1);
    layer->inputs = malloc(layer->num_pairs * sizeof *layer->inputs + 1);
    layer->middles = malloc(layer->num_pairs * sizeof *layer->middles + 1);
    return layer->hidden && layer->activations && layer->results && layer->inputs && layer->middles
               ? 0
               : -1;
}

static void point_to_rows(Layer *layer) {
    const MoeArguments *a = layer->arguments;
    for (size_t choice = 0; choice < a->num_rows * a->top_k; choice++)
        if (layer->places[choice] >= 0)
            layer->inputs[layer->places[choice]] =
                layer->hidden + choice / a->top_k * a->hidden_size;
    for (size_t pair = 0; pair < layer->num_pairs; pair++)
        layer->middles[pair] = layer->activations + pair * a->intermediate_size;
}

static void multiply(Layer *layer) {
    const MoeArguments *a = layer->arguments;
    const unsigned few = a->num_rows < FEW_ROWS ? 1 : a->num_threads;
    run_tasks(widen_row, layer, a->num_rows, few);
    run_tasks(gate_and_up, layer, layer->num_groups * blocks(a->intermediate_size, UP_BLOCK),
              a->num_threads);
    run_tasks(down, layer, layer->num_groups * blocks(a->hidden_size, DOWN_BLOCK), a->num_threads);
    run_tasks(a->topk_weights ? sum_row : write_pairs, layer, a->num_rows, few);
}

static void release(Layer *layer) {
    free(layer->group_slots);
    free(layer->group_starts);
    free(layer->places);
    free(layer->hidden);
    free(layer->activations);
    free(layer->results);
    free(layer->inputs);
    free(layer->middles);
}

int moe_ffn(const MoeArguments *arguments) {
    Layer layer = {.arguments = arguments};
    size_t *starts = calloc(arguments->num_slots + 1, sizeof *starts);
    int status = starts == NULL ? -1 : count_pairs(arguments, starts);
    if (status == 0) status = allocate_sorting(&layer);
    if (status == 0) {
        sort_pairs(&layer, starts);
        status = allocate_rows(&layer);
    }
    if (status == 0) {
        point_to_rows(&layer);
        multiply(&layer);
    }
    release(&layer);
    free(starts);
    return status;
}
