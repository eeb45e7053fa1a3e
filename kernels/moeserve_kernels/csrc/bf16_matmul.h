/* Products of float32 rows with bfloat16 weights, summed in float32. x86 with AVX2 and FMA. */
#ifndef MOESERVE_BF16_MATMUL_H
#define MOESERVE_BF16_MATMUL_H

#include <stddef.h>
#include <stdint.h>

/* Elements that one step along the depth takes; the depth must be a multiple of it. */
#define DEPTH_STEP 16

/* Rows wait in "split" form: of each 16 elements the 8 even ones come first, then the 8 odd ones.
 * A register of 16 bfloat16 weights falls apart the same way, with one shift and one mask. */

/* Whether this CPU runs the functions below. */
int bf16_matmul_supported(void);

/* Writes one bfloat16 row of `depth` elements to `split`. */
void split_bf16_row(const uint16_t *row, size_t depth, float *split);

/* Writes silu(gate) * up to `split`; `gate` and `up` are in order; `depth` as above. */
void split_silu_mul(const float *gate, const float *up, size_t depth, float *split);

/* `count` rows of bfloat16, `stride` elements from one to the next. */
typedef struct {
    const uint16_t *first;
    size_t count, stride;
} Bf16Rows;

/* out[m * out_stride + n] = sum over k < depth of rows[m][k] * weight[n][k].
 *
 * rows: `num_rows` pointers to rows in split form.
 * An element's bits depend on its row and its weight alone, not on what is computed beside it. */
void bf16_matmul(const float *const *rows, size_t num_rows, Bf16Rows weight, size_t depth,
                 float *out, size_t out_stride);

/* sums[m][k] += factors[m * factor_stride + n] * values[n][k], for n in order; sums are split. */
void bf16_weighted_sum(const float *factors, size_t factor_stride, size_t num_rows,
                       Bf16Rows values, size_t depth, float *const *sums);

/* numbers[i] = exp(numbers[i] - shift), 0 for what is below -87; returns their sum.
 * count is a multiple of 8. */
float exponentials(float *numbers, size_t count, float shift);

/* The reverse of split_bf16_row, of row * factor. */
void join_bf16_row(const float *split, float factor, size_t depth, uint16_t *row);

/* Rounds to nearest, ties to even, NaN kept. */
void round_to_bf16(const float *from, size_t count, uint16_t *to);

/* sum[i] += factor * row[i]; count is a multiple of 8. */
void add_scaled(const float *row, float factor, size_t count, float *sum);

#endif
