/* A dense layer: rows are widened once, then threads take blocks of outputs. */
#include <stdlib.h>

#include "bf16_matmul.h"
#include "operations.h"
#include "parallel.h"
#include "sizes.h"

#define BLOCK_OUTPUTS 48 /* of one task; a multiple of what the tile takes at once */
#define BLOCK_ROWS 64

typedef struct {
    const uint16_t *x, *weight;
    uint16_t *out;
    size_t num_rows, num_outputs, depth;
    float *split;
    const float **rows;
} Layer;

static void widen_row(void *context, size_t row) {
    Layer *layer = context;
    float *split = layer->split + row * layer->depth;
    split_bf16_row(layer->x + row * layer->depth, layer->depth, split);
    layer->rows[row] = split;
}

static void multiply_block(void *context, size_t index) {
    const Layer *layer = context;
    const size_t first = index * BLOCK_OUTPUTS;
    const size_t count = smaller(BLOCK_OUTPUTS, layer->num_outputs - first);
    const Bf16Rows weight = {layer->weight + first * layer->depth, count, layer->depth};
    float product[BLOCK_ROWS * BLOCK_OUTPUTS];
    for (size_t row = 0; row < layer->num_rows; row += BLOCK_ROWS) {
        const size_t height = smaller(BLOCK_ROWS, layer->num_rows - row);
        bf16_matmul(layer->rows + row, height, weight, layer->depth, product, BLOCK_OUTPUTS);
        for (size_t m = 0; m < height; m++)
            round_to_bf16(product + m * BLOCK_OUTPUTS, count,
                          layer->out + (row + m) * layer->num_outputs + first);
    }
}

int linear(const uint16_t *x, const uint16_t *weight, uint16_t *out, size_t num_rows,
           size_t num_outputs, size_t depth, unsigned num_threads) {
    Layer layer = {.x = x, .weight = weight, .out = out};
    layer.num_rows = num_rows, layer.num_outputs = num_outputs, layer.depth = depth;
    layer.split = malloc(num_rows * depth * sizeof(float) + 1);
    layer.rows = malloc(num_rows * sizeof(float *) + 1);
    const int failed = layer.split == NULL || layer.rows == NULL;
    if (!failed) {
        run_tasks(widen_row, &layer, num_rows, num_rows < 16 ? 1 : num_threads);
        run_tasks(multiply_block, &layer, blocks(num_outputs, BLOCK_OUTPUTS), num_threads);
    }
    free(layer.split);
    free(layer.rows);
    return failed ? -1 : 0;
}
