/* See the header. A tile keeps the sums of M rows x N outputs in registers, so that each loaded
 * weight serves M rows and each loaded row element N outputs; with N weights and one row element
 * they must fit into 16 registers. Fewer rows leave room for more outputs, which hides the latency
 * of the additions. (4 x 3 would need all 16 and spills: 15 % slower than 4 x 2.) */
#include "bf16_matmul.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,fma")))
#define INLINE AVX2 inline __attribute__((always_inline)) static

int bf16_matmul_supported(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

INLINE __m256 even_elements(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}

INLINE __m256 odd_elements(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000u)));
}

INLINE float sum_of_lanes(__m256 x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

AVX2 void split_bf16_row(const uint16_t *row, size_t depth, float *split) {
    for (size_t k = 0; k < depth; k += DEPTH_STEP) {
        __m256i pairs = _mm256_loadu_si256((const __m256i *)(row + k));
        _mm256_storeu_ps(split + k, even_elements(pairs));
        _mm256_storeu_ps(split + k + 8, odd_elements(pairs));
    }
}

/* M rows times N outputs; M and N are constants where it is inlined. Meanwhile the weights of the
 * outputs `ahead` further on are fetched (0: none): the processor's own prefetching stops at the end
 * of each row, which is near. */
INLINE void tile(const int M, const int N, const float *const *rows, const uint16_t *weight,
                 size_t stride, size_t depth, float *out, size_t out_stride, size_t ahead) {
    __m256 sums[4][6];
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 6
        for (int n = 0; n < N; n++) sums[m][n] = _mm256_setzero_ps();
    for (size_t k = 0; k < depth; k += DEPTH_STEP) {
        if (ahead > 0)
#pragma GCC unroll 6
            for (int n = 0; n < N; n++)
                _mm_prefetch((const char *)(weight + (n + ahead) * stride + k), _MM_HINT_T0);
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            __m256 weights[6];
#pragma GCC unroll 6
            for (int n = 0; n < N; n++) {
                __m256i pairs = _mm256_loadu_si256((const __m256i *)(weight + n * stride + k));
                weights[n] = odd ? odd_elements(pairs) : even_elements(pairs);
            }
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) {
                __m256 x = _mm256_loadu_ps(rows[m] + k + 8 * odd);
                __asm__("" : "+x"(x)); /* stay in a register: else loaded again for each n */
#pragma GCC unroll 6
                for (int n = 0; n < N; n++) sums[m][n] = _mm256_fmadd_ps(weights[n], x, sums[m][n]);
            }
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 6
        for (int n = 0; n < N; n++) out[m * out_stride + n] = sum_of_lanes(sums[m][n]);
}

/* All outputs for M rows, N outputs at a time and the rest one by one. `ahead` as above, where
 * NEXT_TILE stands for N. */
#define NEXT_TILE ((size_t)-1)
#define ROWS(M, N)                                                                               \
    AVX2 static void rows_##M(const float *const *rows, Bf16Rows weight, size_t depth,           \
                              float *out, size_t out_stride, size_t ahead) {                     \
        const uint16_t *next = weight.first;                                                     \
        const size_t stride = weight.stride;                                                     \
        size_t n = 0;                                                                            \
        if (ahead == NEXT_TILE) ahead = N;                                                       \
        for (; n + N <= weight.count; n += N, next += N * stride)                                \
            tile(M, N, rows, next, stride, depth, out + n, out_stride, ahead);                   \
        for (; n < weight.count; n++, next += stride)                                            \
            tile(M, 1, rows, next, stride, depth, out + n, out_stride, 0);                       \
    }
ROWS(1, 6)
ROWS(2, 4)
ROWS(3, 3)
ROWS(4, 2)

/* Outputs whose weights stay in the second-level cache while all rows pass, four by four. */
#define OUTPUT_BLOCK 48

void bf16_matmul(const float *const *rows, size_t num_rows, Bf16Rows weight, size_t depth,
                 float *out, size_t out_stride) {
    const int in_one_pass = num_rows <= 4;
    const size_t block = in_one_pass ? weight.count : OUTPUT_BLOCK;
    for (size_t n = 0; n < weight.count; n += block) {
        Bf16Rows part = {weight.first + n * weight.stride, block, weight.stride};
        if (part.count > weight.count - n) part.count = weight.count - n;
        for (size_t m = 0; m < num_rows; m += 4) {
            float *corner = out + m * out_stride + n;
            const size_t ahead = in_one_pass ? NEXT_TILE : m == 0 ? block : 0;
            switch (num_rows - m) {
                case 1: rows_1(rows + m, part, depth, corner, out_stride, ahead); break;
                case 2: rows_2(rows + m, part, depth, corner, out_stride, ahead); break;
                case 3: rows_3(rows + m, part, depth, corner, out_stride, ahead); break;
                default: rows_4(rows + m, part, depth, corner, out_stride, ahead);
            }
        }
    }
}

/* The weighted sum of one step along the depth for M rows, kept in registers. */
INLINE void sum_tile(const int M, const float *factors, size_t factor_stride, Bf16Rows values,
                     size_t k, float *const *sums) {
    __m256 even[4], odd[4];
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
        even[m] = _mm256_loadu_ps(sums[m] + k);
        odd[m] = _mm256_loadu_ps(sums[m] + k + 8);
    }
    for (size_t n = 0; n < values.count; n++) {
        const __m256i *address = (const __m256i *)(values.first + n * values.stride + k);
        const __m256i pairs = _mm256_loadu_si256(address);
        const __m256 even_value = even_elements(pairs), odd_value = odd_elements(pairs);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            const __m256 factor = _mm256_set1_ps(factors[m * factor_stride + n]);
            even[m] = _mm256_fmadd_ps(factor, even_value, even[m]);
            odd[m] = _mm256_fmadd_ps(factor, odd_value, odd[m]);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
        _mm256_storeu_ps(sums[m] + k, even[m]);
        _mm256_storeu_ps(sums[m] + k + 8, odd[m]);
    }
}

AVX2 void bf16_weighted_sum(const float *factors, size_t factor_stride, size_t num_rows,
                            Bf16Rows values, size_t depth, float *const *sums) {
    for (size_t m = 0; m < num_rows; m += 4) {
        const float *part = factors + m * factor_stride;
        for (size_t k = 0; k < depth; k += DEPTH_STEP) {
            switch (num_rows - m) {
                case 1: sum_tile(1, part, factor_stride, values, k, sums + m); break;
                case 2: sum_tile(2, part, factor_stride, values, k, sums + m); break;
                case 3: sum_tile(3, part, factor_stride, values, k, sums + m); break;
                default: sum_tile(4, part, factor_stride, values, k, sums + m);
            }
        }
    }
}

/* exp(x) for x <= 88, within 2 units in the last place; 0 below -87, NaN for NaN. 2^n * p(r) with
 * x = n ln2 + r, |r| <= ln2 / 2; p is the Taylor polynomial of degree 7 (its error is below 1e-8). */
INLINE __m256 exponential(__m256 x) {
    const __m256 least = _mm256_set1_ps(-87.0f);
    __m256 in_range = _mm256_cmp_ps(x, least, _CMP_NLT_UQ);
    __m256 clipped = _mm256_max_ps(least, _mm256_min_ps(_mm256_set1_ps(88.0f), x));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(clipped, _mm256_set1_ps(1.44269504f)), 0);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), clipped); /* ln2, upper bits */
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);           /* and the rest */
    static const float factors[] = {1.f / 5040, 1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, .5f, 1, 1};
    __m256 p = _mm256_set1_ps(factors[0]);
    for (int i = 1; i < 8; i++) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(factors[i]));
    __m256i power = _mm256_slli_epi32(
        _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(in_range, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

INLINE __m256 silu(__m256 x) { /* x / (1 + exp(-x)), by way of exp(-|x|), which can not overflow */
    const __m256 sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f);
    __m256 small = exponential(_mm256_or_ps(x, sign));
    __m256 numerator = _mm256_blendv_ps(one, small, x); /* negative x: exp(x) / (1 + exp(x)) */
    __m256 sigmoid = _mm256_div_ps(numerator, _mm256_add_ps(one, small));
    return _mm256_mul_ps(x, sigmoid);
}

AVX2 void split_silu_mul(const float *gate, const float *up, size_t depth, float *split) {
    const __m256i order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
    for (size_t k = 0; k < depth; k += DEPTH_STEP) {
        __m256 low = _mm256_mul_ps(silu(_mm256_loadu_ps(gate + k)), _mm256_loadu_ps(up + k));
        __m256 high =
            _mm256_mul_ps(silu(_mm256_loadu_ps(gate + k + 8)), _mm256_loadu_ps(up + k + 8));
        __m256 even = _mm256_shuffle_ps(low, high, 0x88), odd = _mm256_shuffle_ps(low, high, 0xdd);
        _mm256_storeu_ps(split + k, _mm256_permutevar8x32_ps(even, order));
        _mm256_storeu_ps(split + k + 8, _mm256_permutevar8x32_ps(odd, order));
    }
}

AVX2 float exponentials(float *numbers, size_t count, float shift) {
    const __m256 wide = _mm256_set1_ps(shift);
    __m256 sum = _mm256_setzero_ps();
    for (size_t i = 0; i < count; i += 8) {
        const __m256 e = exponential(_mm256_sub_ps(_mm256_loadu_ps(numbers + i), wide));
        _mm256_storeu_ps(numbers + i, e);
        sum = _mm256_add_ps(sum, e);
    }
    return sum_of_lanes(sum);
}

void join_bf16_row(const float *split, float factor, size_t depth, uint16_t *row) {
    float joined[DEPTH_STEP];
    for (size_t k = 0; k < depth; k += DEPTH_STEP) {
        for (int i = 0; i < 8; i++) {
            joined[2 * i] = split[k + i] * factor;
            joined[2 * i + 1] = split[k + 8 + i] * factor;
        }
        round_to_bf16(joined, DEPTH_STEP, row + k);
    }
}

AVX2 void round_to_bf16(const float *from, size_t count, uint16_t *to) {
    for (size_t i = 0; i < count; i++) {
        union { float value; uint32_t bits; } x = {from[i]};
        const uint32_t rounded = (x.bits + 0x7fffu + ((x.bits >> 16) & 1u)) >> 16;
        to[i] = (uint16_t)((x.bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
}

AVX2 void add_scaled(const float *row, float factor, size_t count, float *sum) {
    const __m256 wide = _mm256_set1_ps(factor);
    for (size_t i = 0; i < count; i += 8) {
        __m256 total = _mm256_fmadd_ps(wide, _mm256_loadu_ps(row + i), _mm256_loadu_ps(sum + i));
        _mm256_storeu_ps(sum + i, total);
    }
}

#else /* another architecture: never called, bf16_matmul_supported() says no */

int bf16_matmul_supported(void) { return 0; }
void split_bf16_row(const uint16_t *row, size_t depth, float *split) {}
void split_silu_mul(const float *gate, const float *up, size_t depth, float *split) {}
void bf16_matmul(const float *const *rows, size_t num_rows, Bf16Rows weight, size_t depth,
                 float *out, size_t out_stride) {}
void bf16_weighted_sum(const float *factors, size_t factor_stride, size_t num_rows,
                       Bf16Rows values, size_t depth, float *const *sums) {}
float exponentials(float *numbers, size_t count, float shift) { return 0; }
void join_bf16_row(const float *split, float factor, size_t depth, uint16_t *row) {}
void round_to_bf16(const float *from, size_t count, uint16_t *to) {}
void add_scaled(const float *row, float factor, size_t count, float *sum) {}

#endif
