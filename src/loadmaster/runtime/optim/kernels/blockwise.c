/* One optimizer step over a list of tensors, moments kept as 8-bit codes with one fp32 scale a block (or as fp32).
 *
 * The code is that of program/codebook.py: the number of a code, read as a float, has the exponent of its value in
 * its own exponent and leading mantissa bits, so that
 *     decode: bits(value) = (bits(float(code)) << taper) - OFFSET
 *     encode: bits(float(code)) = (bits(value) + OFFSET) >> taper
 * and nothing is searched or looked up. Every block is decoded, updated and encoded while it lies in the first-level
 * cache; no temporary of a parameter's size exists. reference.py is the truth this file is tested against.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BW__
#include <immintrin.h>
#endif

enum { MAX_BLOCK = 4096, COLUMNS = 10, SCALARS = 12 };
enum { ADAM = 0, MOMENTUM = 1, LION = 2, ADAGRAD = 3 };
enum { PARAM_BF16 = 1, GRAD_BF16 = 2, STOCHASTIC_WEIGHTS = 4, STATE_32_BIT = 8, NESTEROV = 16 };

typedef struct {
    float beta1, beta2, rest1, rest2, decay, l2, step, root, eps, dithered, grad_scale, unused;
} Scalars;

typedef struct {
    void *param;
    const void *grad;
    void *first, *second;
    float *first_scale, *second_scale;
    int64_t numel, start, flags, key;
} Tensor;

static inline float as_float(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
static inline uint32_t as_bits(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }

/* offsets that put the largest code into [1, 2): see Code.offset */
#define SIGNED_OFFSET (140u << 23)
#define UNSIGNED_OFFSET (412u << 23)
#define SIGNED_TOP as_float((as_bits(127.0f) << 1) - SIGNED_OFFSET)
#define UNSIGNED_TOP as_float((as_bits(255.0f) << 2) - UNSIGNED_OFFSET)
#define SIGNED_UNIT 8192.0f /* 1 / value of code 1, before scaling by SIGNED_TOP */
#define GOLDEN 0x9E3779B9u
#define DITHER_MASK 0x7FFE00u /* 14 bits: a top code plus the largest dither still truncates to the top code */

static inline uint32_t mix(uint32_t x) {
    x ^= x >> 16; x *= 0x21F0AAADu;
    x ^= x >> 15; x *= 0x735A2D97u;
    return x ^ (x >> 15);
}

/* [1, 2) from 14 bits of a Weyl sequence inside the block, turned by a hash of (seed, step, block): the upper bits
 * (>> 9) for the first moment, lower ones (<< 5) for the second */
static inline float dither(uint32_t shifted) { return as_float((shifted & DITHER_MASK) | 0x3F800000u); }

static inline float decode_signed(int code, float unit) {
    uint32_t bits = as_bits((float)code), magnitude = (bits << 1) - SIGNED_OFFSET;
    return bits ? as_float((bits & 0x80000000u) | magnitude) * unit : 0.0f;
}

static inline float decode_unsigned(int code, float unit) {
    uint32_t bits = as_bits((float)code);
    return bits ? as_float((bits << 2) - UNSIGNED_OFFSET) * unit : 0.0f;
}

static inline float inverse(float top, float scale) { return scale > 0 ? fminf(top / scale, FLT_MAX) : 0.0f; }

#if defined(__AVX512BW__) && defined(__AVX512DQ__)
#define WIDE 64    /* elements handled at once: one vector of codes, four of floats */
#define AHEAD 1024 /* elements fetched in advance, so that memory does not rest while codes are made */
typedef __m512 vf;
typedef __m512i vi;
static inline void fetch(const void *x) { _mm_prefetch((const char *)x, _MM_HINT_T0); }
static inline vf vset(float x) { return _mm512_set1_ps(x); }
static inline vi vbits(uint32_t x) { return _mm512_set1_epi32((int)x); }
static inline vi as_vi(vf x) { return _mm512_castps_si512(x); }
static inline vf as_vf(vi x) { return _mm512_castsi512_ps(x); }
static inline vi transposed(vi x) { /* its own inverse: dwords as a 4 x 4 matrix */
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x);
}

static inline vi weyl_start(uint32_t turn) {
    const vi lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_add_epi32(vbits(turn), _mm512_mullo_epi32(lane, vbits(GOLDEN)));
}
static inline vi weyl_next(vi weyl) { return _mm512_add_epi32(weyl, vbits(16u * GOLDEN)); }
static inline vf vdither(vi shifted) { /* (shifted & mask) | one */
    return as_vf(_mm512_ternarylogic_epi32(shifted, vbits(DITHER_MASK), vbits(0x3F800000u), 0xEA));
}

/* bytes of four vectors of int32 less `minus`, in order, saturated to unsigned bytes or to signed ones */
static inline vi pack(const vi *x, short minus, int to_unsigned) {
    vi low = _mm512_packs_epi32(x[0], x[1]), high = _mm512_packs_epi32(x[2], x[3]);
    if (minus) low = _mm512_sub_epi16(low, _mm512_set1_epi16(minus));
    if (minus) high = _mm512_sub_epi16(high, _mm512_set1_epi16(minus));
    return transposed(to_unsigned ? _mm512_packus_epi16(low, high) : _mm512_packs_epi16(low, high));
}

#ifdef __AVX512VBMI__
/* the upper 16 bits of every curve value, all that is not zero of them, as tables of low and high bytes */
static struct { _Alignas(64) uint8_t signed_low[128], signed_high[128], low[256], high[256]; } table;

static void fill_table(void) {
    for (int c = 0; c < 256; c++) {
        uint32_t u = as_bits(decode_unsigned(c, 1.0f)) >> 16, s = as_bits(decode_signed(c & 127, 1.0f)) >> 16;
        table.low[c] = (uint8_t)u, table.high[c] = (uint8_t)(u >> 8);
        table.signed_low[c & 127] = (uint8_t)s, table.signed_high[c & 127] = (uint8_t)(s >> 8);
    }
}

static inline vi look_up(const uint8_t *entries, vi codes) { /* 128 bytes, by the low 7 bits of each code */
    return _mm512_permutex2var_epi8(_mm512_load_si512(entries), codes, _mm512_load_si512(entries + 64));
}
static inline void spread(vi low, vi high, vf *out) { /* bytes to floats, whose lower 16 bits are zero */
    const vi zero = _mm512_setzero_si512(), a = _mm512_unpacklo_epi8(low, high), b = _mm512_unpackhi_epi8(low, high);
    out[0] = as_vf(_mm512_unpacklo_epi16(zero, a)), out[1] = as_vf(_mm512_unpackhi_epi16(zero, a));
    out[2] = as_vf(_mm512_unpacklo_epi16(zero, b)), out[3] = as_vf(_mm512_unpackhi_epi16(zero, b));
}
static inline void curve_signed(vi codes, vf *out) {
    codes = transposed(codes);
    vi magnitude = _mm512_abs_epi8(codes);
    vi high = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi8(-128), look_up(table.signed_high, magnitude), 0xEA);
    spread(look_up(table.signed_low, magnitude), high, out);
}
static inline void curve_unsigned(vi codes, vf *out) {
    codes = transposed(codes);
    __mmask64 upper = _mm512_movepi8_mask(codes);
    spread(_mm512_mask_blend_epi8(upper, look_up(table.low, codes), look_up(table.low + 128, codes)),
           _mm512_mask_blend_epi8(upper, look_up(table.high, codes), look_up(table.high + 128, codes)), out);
}
#else
static void fill_table(void) {}
static inline void curve_signed(vi codes, vf *out) {
    _Alignas(64) int8_t c[WIDE];
    _mm512_store_si512(c, codes);
    for (int k = 0; k < 4; k++) {
        vi bits = as_vi(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i *)(c + 16 * k)))));
        vi magnitude = _mm512_sub_epi32(_mm512_slli_epi32(bits, 1), vbits(SIGNED_OFFSET));
        out[k] = as_vf(_mm512_maskz_mov_epi32(_mm512_test_epi32_mask(bits, bits),
                                              _mm512_ternarylogic_epi32(bits, vbits(0x80000000u), magnitude, 0xEA)));
    }
}
static inline void curve_unsigned(vi codes, vf *out) {
    _Alignas(64) uint8_t c[WIDE];
    _mm512_store_si512(c, codes);
    for (int k = 0; k < 4; k++) {
        vi bits = as_vi(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128((const __m128i *)(c + 16 * k)))));
        out[k] = as_vf(_mm512_maskz_sub_epi32(_mm512_test_epi32_mask(bits, bits), _mm512_slli_epi32(bits, 2),
                                              vbits(UNSIGNED_OFFSET)));
    }
}
#endif
#else
static void fill_table(void) {}
#endif

/* Codes of `x` (n values, n a multiple of 64) in units of their largest magnitude, written over the old codes.
 * Each value goes to its nearest code; where that is the code it had, so that the move would be lost, and lost again
 * at every step to come, it is rounded stochastically instead (`dithered`; 0: always to the nearest). */
static void encode_signed(const float *restrict x, int8_t *restrict codes, float scale, int n, int dithered,
                          uint32_t turn) {
    const float inv = inverse(SIGNED_TOP, scale);
#ifdef WIDE
    vi weyl = weyl_start(turn);
    const __mmask64 use = dithered ? ~(__mmask64)0 : 0;
    for (int i = 0; i < n; i += WIDE) {
        vi near[4], far[4];
        for (int k = 0; k < 4; k++, weyl = weyl_next(weyl)) {
            vf t = _mm512_mul_ps(_mm512_loadu_ps(x + i + 16 * k), vset(inv));
            vi half = _mm512_srli_epi32(_mm512_slli_epi32(as_vi(t), 1), 2);
            vf curve = as_vf(_mm512_add_epi32(half, vbits(SIGNED_OFFSET >> 1)));
            vf y = _mm512_range_ps(_mm512_mul_ps(t, vset(SIGNED_UNIT)), curve, 2); /* the smaller, sign of t */
            near[k] = _mm512_cvtps_epi32(y);
            far[k] = _mm512_cvt_roundps_epi32(_mm512_add_ps(y, vdither(_mm512_srli_epi32(weyl, 9))),
                                              _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        }
        vi old = _mm512_loadu_si512(codes + i);
        vi to_near = pack(near, 0, 0), to_far = _mm512_max_epi8(pack(far, 1, 0), _mm512_set1_epi8(-127));
        __mmask64 lost = _mm512_mask_cmpeq_epi8_mask(use, to_near, old);
        _mm512_storeu_si512(codes + i, _mm512_mask_mov_epi8(to_near, lost, to_far));
    }
#else
    for (int i = 0; i < n; i++) {
        uint32_t bits = as_bits(x[i] * inv), magnitude = bits & 0x7FFFFFFFu;
        float y = as_float((magnitude >> 1) + (SIGNED_OFFSET >> 1)), line = as_float(magnitude) * SIGNED_UNIT;
        y = as_float((bits & 0x80000000u) | as_bits(y < line ? y : line));
        int near = (int)rintf(y), far = (int)floorf(y + dither((turn + GOLDEN * (uint32_t)i) >> 9)) - 1;
        far = far < -127 ? -127 : far;
        codes[i] = (int8_t)(dithered && near == codes[i] ? far : near);
    }
#endif
}

/* As encode_signed for values >= 0; what is not zero never becomes code 0. Takes the dither's lower bits. */
static void encode_unsigned(const float *restrict x, uint8_t *restrict codes, float scale, int n, int dithered,
                            uint32_t turn) {
    const float inv = inverse(UNSIGNED_TOP, scale);
#ifdef WIDE
    vi weyl = weyl_start(turn);
    const __mmask64 use = dithered ? ~(__mmask64)0 : 0;
    for (int i = 0; i < n; i += WIDE) {
        vi near[4], far[4];
        for (int k = 0; k < 4; k++, weyl = weyl_next(weyl)) {
            vf value = _mm512_loadu_ps(x + i + 16 * k);
            vi bits = as_vi(_mm512_mul_ps(value, vset(inv)));
            vf curve = as_vf(_mm512_add_epi32(_mm512_srli_epi32(bits, 2), vbits(UNSIGNED_OFFSET >> 2)));
            vf y = _mm512_maskz_max_ps(_mm512_test_epi32_mask(as_vi(value), as_vi(value)), curve, vset(1.0f));
            near[k] = _mm512_cvtps_epi32(y);
            far[k] = _mm512_cvttps_epi32(_mm512_add_ps(y, vdither(_mm512_slli_epi32(weyl, 5))));
        }
        vi old = _mm512_loadu_si512(codes + i);
        vi to_near = pack(near, 0, 1), to_far = pack(far, 1, 1);
        __mmask64 lost = _mm512_mask_cmpeq_epi8_mask(use, to_near, old);
        _mm512_storeu_si512(codes + i, _mm512_mask_mov_epi8(to_near, lost, to_far));
    }
#else
    for (int i = 0; i < n; i++) {
        float y = as_float((as_bits(x[i] * inv) >> 2) + (UNSIGNED_OFFSET >> 2));
        y = x[i] > 0 ? (y > 1.0f ? y : 1.0f) : 0.0f;
        int near = (int)rintf(y), far = (int)(y + dither((turn + GOLDEN * (uint32_t)i) << 5)) - 1;
        near = near > 255 ? 255 : near, far = far > 255 ? 255 : far;
        codes[i] = (uint8_t)(dithered && near == codes[i] ? far : near);
    }
#endif
}

/* Largest magnitude by its bits: an infinity or a NaN becomes the scale, and everything read back is then NaN. */
static float largest(const float *restrict x, int n) {
    uint32_t top = 0;
    for (int i = 0; i < n; i++) {
        uint32_t bits = as_bits(x[i]) & 0x7FFFFFFFu;
        top = bits > top ? bits : top;
    }
    return as_float(top);
}

/* The update rules. m, v: fp32 moments of this block, updated in place. */
static void adam(float *restrict p, const float *restrict g, float *restrict m, float *restrict v, int n,
                 const Scalars *s) {
    for (int i = 0; i < n; i++) {
        float grad = g[i] * s->grad_scale + s->l2 * p[i];
        m[i] = s->beta1 * m[i] + s->rest1 * grad;
        v[i] = s->beta2 * v[i] + s->rest2 * (grad * grad);
        p[i] = p[i] * s->decay - s->step * (m[i] / (sqrtf(v[i]) * s->root + s->eps));
    }
}

static void momentum(float *restrict p, const float *restrict g, float *restrict m, int n, const Scalars *s,
                     int nesterov) {
    for (int i = 0; i < n; i++) {
        float grad = g[i] * s->grad_scale + s->l2 * p[i];
        m[i] = s->beta1 * m[i] + s->rest1 * grad;
        p[i] = p[i] * s->decay - s->step * (nesterov ? grad + s->beta1 * m[i] : m[i]);
    }
}

static void lion(float *restrict p, const float *restrict g, float *restrict m, int n, const Scalars *s) {
    for (int i = 0; i < n; i++) {
        float grad = g[i] * s->grad_scale;
        float direction = s->beta1 * m[i] + s->rest1 * grad;
        float sign = direction > 0 ? 1.0f : direction < 0 ? -1.0f : direction; /* NaN stays NaN */
        p[i] = p[i] * s->decay - s->step * sign;
        m[i] = s->beta2 * m[i] + s->rest2 * grad;
    }
}

static void adagrad(float *restrict p, const float *restrict g, float *restrict v, int n, const Scalars *s) {
    for (int i = 0; i < n; i++) {
        float grad = g[i] * s->grad_scale + s->l2 * p[i];
        v[i] += grad * grad;
        p[i] = p[i] * s->decay - s->step * (grad / (sqrtf(v[i]) + s->eps));
    }
}

#ifdef WIDE
/* adam on coded moments in one pass: decode, update, keep the new moments and their largest magnitudes. The quotient
 * is a 14-bit estimate and one Newton step, within 2^-26 of it: the divider would be busy half of the time. */
static inline __attribute__((always_inline)) void adam_wide(
    float *restrict p, const float *restrict g, const int8_t *restrict mc, const uint8_t *restrict vc,
    float *restrict m_out, float *restrict v_out, float *m_scale, float *v_scale, int n, const Scalars *s, int plain) {
    const vf unit_m = vset(*m_scale / SIGNED_TOP * s->beta1), unit_v = vset(*v_scale / UNSIGNED_TOP * s->beta2);
    vi top_m = _mm512_setzero_si512(), top_v = _mm512_setzero_si512();
    for (int i = 0; i < n; i += WIDE) {
        for (int k = 0; k < 4; k++) fetch(p + i + AHEAD + 16 * k), fetch(g + i + AHEAD + 16 * k);
        fetch(mc + i + AHEAD), fetch(vc + i + AHEAD);
        vi codes_v = _mm512_loadu_si512(vc + i);
        vf old_m[4], old_v[4];
        curve_signed(_mm512_maskz_loadu_epi8(_mm512_test_epi8_mask(codes_v, codes_v), mc + i), old_m);
        curve_unsigned(codes_v, old_v); /* m counts as 0 where v is 0 */
        for (int k = 0; k < 4; k++) {
            const int j = i + 16 * k;
            vf w = _mm512_loadu_ps(p + j), grad = _mm512_loadu_ps(g + j);
            if (!plain) grad = _mm512_fmadd_ps(grad, vset(s->grad_scale), _mm512_mul_ps(w, vset(s->l2)));
            vf m = _mm512_fmadd_ps(old_m[k], unit_m, _mm512_mul_ps(grad, vset(s->rest1)));
            vf v = _mm512_fmadd_ps(old_v[k], unit_v, _mm512_mul_ps(_mm512_mul_ps(grad, grad), vset(s->rest2)));
            _mm512_store_ps(m_out + j, m);
            _mm512_store_ps(v_out + j, v);
            top_m = _mm512_max_epu32(top_m, _mm512_andnot_epi32(vbits(0x80000000u), as_vi(m)));
            top_v = _mm512_max_epu32(top_v, as_vi(v));
            vf d = _mm512_fmadd_ps(_mm512_sqrt_ps(v), vset(s->root), vset(s->eps));
            vf q = _mm512_rcp14_ps(d);
            q = _mm512_fmadd_ps(q, _mm512_fnmadd_ps(d, q, vset(1.0f)), q);
            w = _mm512_fnmadd_ps(_mm512_mul_ps(m, vset(s->step)), q, _mm512_mul_ps(w, vset(s->decay)));
            _mm512_storeu_ps(p + j, w);
        }
    }
    *m_scale = as_float(_mm512_reduce_max_epu32(top_m));
    *v_scale = as_float(_mm512_reduce_max_epu32(top_v));
}

static void adam_coded(float *restrict p, const float *restrict g, const int8_t *restrict mc,
                       const uint8_t *restrict vc, float *restrict m, float *restrict v, float *m_scale,
                       float *v_scale, int n, const Scalars *s) {
    if (s->l2 == 0.0f && s->grad_scale == 1.0f) adam_wide(p, g, mc, vc, m, v, m_scale, v_scale, n, s, 1);
    else adam_wide(p, g, mc, vc, m, v, m_scale, v_scale, n, s, 0);
}
#else
static void adam_coded(float *restrict p, const float *restrict g, const int8_t *restrict mc,
                       const uint8_t *restrict vc, float *restrict m, float *restrict v, float *m_scale,
                       float *v_scale, int n, const Scalars *s) {
    const float unit_m = *m_scale / SIGNED_TOP, unit_v = *v_scale / UNSIGNED_TOP;
    for (int i = 0; i < n; i++) {
        v[i] = decode_unsigned(vc[i], unit_v);
        float old = decode_signed(mc[i], unit_m);
        m[i] = vc[i] ? old : 0.0f;
    }
    adam(p, g, m, v, n, s);
    *m_scale = largest(m, n);
    *v_scale = largest(v, n);
}
#endif

typedef struct {
    _Alignas(64) float p[MAX_BLOCK], g[MAX_BLOCK], m[MAX_BLOCK], v[MAX_BLOCK];
    _Alignas(64) uint8_t first[MAX_BLOCK], second[MAX_BLOCK];
} Room;

/* `count` whole blocks. All are updated before any is encoded: a block's scale is known only after its last element,
 * and the next block's work fills that wait. */
static void update_coded(int kind, float *p, const float *g, int8_t *mc, uint8_t *vc, float *ms, float *vs, int block,
                         int count, const Scalars *s, int nesterov, const uint32_t *turns, Room *room) {
    for (int b = 0; b < count; b++) {
        const int at = b * block;
        float *m = room->m + at, *v = room->v + at;
        if (kind == ADAM) {
            adam_coded(p + at, g + at, mc + at, vc + at, m, v, ms + b, vs + b, block, s);
        } else if (kind == ADAGRAD) {
            for (int i = 0; i < block; i++) v[i] = decode_unsigned(vc[at + i], vs[b] / UNSIGNED_TOP);
            adagrad(p + at, g + at, v, block, s);
            vs[b] = largest(v, block);
        } else {
            for (int i = 0; i < block; i++) m[i] = decode_signed(mc[at + i], ms[b] / SIGNED_TOP);
            if (kind == LION) lion(p + at, g + at, m, block, s);
            else momentum(p + at, g + at, m, block, s, nesterov);
            ms[b] = largest(m, block);
        }
    }
    for (int b = 0; b < count && kind != ADAGRAD; b++)
        encode_signed(room->m + b * block, mc + b * block, ms[b], block, s->dithered > 0, turns[b]);
    for (int b = 0; b < count && (kind == ADAM || kind == ADAGRAD); b++)
        encode_unsigned(room->v + b * block, vc + b * block, vs[b], block, s->dithered > 0, turns[b]);
}

static void update_plain(int kind, float *p, const float *g, float *m, float *v, int n, const Scalars *s,
                         int nesterov) {
    switch (kind) {
        case ADAM: adam(p, g, m, v, n, s); break;
        case MOMENTUM: momentum(p, g, m, n, s, nesterov); break;
        case LION: lion(p, g, m, n, s); break;
        default: adagrad(p, g, v, n, s);
    }
}

static void widen(const uint16_t *restrict x, float *restrict out, int n) {
    for (int i = 0; i < n; i++) out[i] = as_float((uint32_t)x[i] << 16);
}

/* fp32 to bf16, to nearest even, or stochastically with a hash of the element's place in the whole tensor */
static void narrow(const float *restrict x, uint16_t *restrict out, int n, int stochastic, uint32_t turn) {
    for (int i = 0; i < n; i++) {
        uint32_t bits = as_bits(x[i]);
        uint32_t add = stochastic ? (turn + GOLDEN * (uint32_t)i) >> 16 : 0x7FFFu + ((bits >> 16) & 1u);
        uint32_t special = (bits & 0x7F800000u) == 0x7F800000u;
        out[i] = (uint16_t)(special ? (bits >> 16) | ((bits & 0xFFFFu) ? 0x40u : 0u) : (bits + add) >> 16);
    }
}

/* `length` elements from `offset`: whole blocks, or the one short block at the tensor's end. */
static void run_step(int kind, const Tensor *t, const Scalars *s, int64_t offset, int length, int block, Room *room) {
    const int coded = !(t->flags & STATE_32_BIT), bf16 = (t->flags & PARAM_BF16) != 0;
    const int count = (length + block - 1) / block, padded = coded ? count * block : length;
    const int partial = padded > length, nesterov = (t->flags & NESTEROV) != 0;
    uint32_t turns[MAX_BLOCK / 64];
    for (int b = 0; b < count; b++) {
        const uint64_t place = (uint64_t)(t->start + offset) / (uint64_t)block + (uint64_t)b;
        turns[b] = mix(mix((uint32_t)t->key ^ (uint32_t)(place >> 32)) + (uint32_t)place);
    }
    float *p = (float *)t->param + offset;
    const float *g = (const float *)t->grad + offset;
    uint16_t *half = (uint16_t *)t->param + offset;
    const size_t size = (size_t)length;
    if (partial) memset(room->p, 0, sizeof room->p), memset(room->g, 0, sizeof room->g);
    if (bf16) widen(half, room->p, length), p = room->p;
    else if (partial) memcpy(room->p, p, 4 * size), p = room->p;
    if (t->flags & GRAD_BF16) widen((const uint16_t *)t->grad + offset, room->g, length), g = room->g;
    else if (partial) memcpy(room->g, g, 4 * size), g = room->g;
    if (!coded) {
        update_plain(kind, p, g, (float *)t->first + offset, (float *)t->second + offset, length, s, nesterov);
    } else {
        int8_t *first = (int8_t *)t->first + offset, *mc = first;
        uint8_t *second = (uint8_t *)t->second + offset, *vc = second;
        if (partial) {
            memset(mc = (int8_t *)room->first, 0, MAX_BLOCK), memset(vc = room->second, 0, MAX_BLOCK);
            if (t->first) memcpy(mc, first, size);
            if (t->second) memcpy(vc, second, size);
        }
        update_coded(kind, p, g, mc, vc, t->first_scale + offset / block, t->second_scale + offset / block, block,
                     count, s, nesterov, turns, room);
        if (partial && t->first) memcpy(first, mc, size);
        if (partial && t->second) memcpy(second, vc, size);
        if (partial && !bf16) memcpy((float *)t->param + offset, p, 4 * size);
    }
    if (!bf16) return;
    for (int b = 0; b < count; b++) {
        int at = b * block, n = length - at < block ? length - at : block;
        narrow(p + at, half + at, n, (t->flags & STOCHASTIC_WEIGHTS) != 0, mix(turns[b] + 2u));
    }
}

/* Elements [first, last) of a tensor, a few whole blocks at a time, then what is left. */
static void share_step(int kind, const Tensor *t, const Scalars *s, int64_t first, int64_t last, int block,
                       Room *room) {
    const int64_t run = block > 1024 ? block : 1024;
    const int64_t whole = first + (last - first) / block * block;
    for (int64_t at = first; at < whole; at += run)
        run_step(kind, t, s, at, (int)(whole - at < run ? whole - at : run), block, room);
    if (whole < last) run_step(kind, t, s, whole, (int)(last - whole), block, room);
}

enum { BLOCKS_A_TURN = 128 }; /* blocks a thread takes at once */

/* One step of every tensor. `tensors`: num x COLUMNS int64 as in Tensor; `scalars`: num x SCALARS floats as in
 * Scalars; `turns[i]`: turns of tensors before i, turns[num] all of them. */
void loadmaster_step(int kind, int64_t num, const Tensor *tensors, const Scalars *scalars, const int64_t *turns,
                     int64_t block, int64_t threads) {
    fill_table();
#pragma omp parallel num_threads((int)threads) if (threads > 1)
    {
        Room room;
#pragma omp for schedule(dynamic, 1)
        for (int64_t turn = 0; turn < turns[num]; turn++) {
            int64_t low = 0, high = num;
            while (high - low > 1) {
                int64_t middle = (low + high) / 2;
                if (turns[middle] <= turn) low = middle; else high = middle;
            }
            const Tensor *t = tensors + low;
            int64_t first = (turn - turns[low]) * BLOCKS_A_TURN * block, last = first + BLOCKS_A_TURN * block;
            share_step(kind, t, scalars + low, first, last < t->numel ? last : t->numel, (int)block, &room);
        }
    }
}

/* What was compiled: elements handled at once, 64 with AVX-512. */
int loadmaster_lanes(void) {
#ifdef WIDE
    return WIDE;
#else
    return 1;
#endif
}
