/* The Python module `_native`: addresses in, status out. `native.py` checks the tensors. */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bf16_matmul.h"
#include "operations.h"

static PyObject *result_of(int status) {
    if (status == -1) return PyErr_NoMemory();
    if (status == -2) {
        PyErr_SetString(PyExc_ValueError, "slots: has an index that is not in [-1, num_slots)");
        return NULL;
    }
    if (status == -3) {
        PyErr_SetString(PyExc_ValueError, "block_table: has no valid block for each token");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *py_supported(PyObject *module, PyObject *ignored) {
    return PyBool_FromLong(bf16_matmul_supported());
}

static PyObject *py_linear(PyObject *module, PyObject *arguments) {
    unsigned long long x, weight, out;
    Py_ssize_t num_rows, num_outputs, depth;
    unsigned num_threads;
    int status;
    if (!PyArg_ParseTuple(arguments, "KKKnnnI", &x, &weight, &out, &num_rows, &num_outputs, &depth,
                          &num_threads))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = linear((const uint16_t *)x, (const uint16_t *)weight, (uint16_t *)out,
                    (size_t)num_rows, (size_t)num_outputs, (size_t)depth, num_threads);
    Py_END_ALLOW_THREADS
    return result_of(status);
}

static PyObject *py_moe_ffn(PyObject *module, PyObject *arguments) {
    unsigned long long hidden_states, w13, w2, slots, topk_weights, out;
    Py_ssize_t num_rows, top_k, num_slots, hidden_size, intermediate_size;
    unsigned num_threads;
    int status;
    if (!PyArg_ParseTuple(arguments, "KKKKKKnnnnnI", &hidden_states, &w13, &w2, &slots,
                          &topk_weights, &out, &num_rows, &top_k, &num_slots, &hidden_size,
                          &intermediate_size, &num_threads))
        return NULL;
    const MoeArguments moe = {
        .hidden_states = (const uint16_t *)hidden_states,
        .w13 = (const uint16_t *)w13,
        .w2 = (const uint16_t *)w2,
        .slots = (const int64_t *)slots,
        .topk_weights = (const float *)topk_weights,
        .out = (uint16_t *)out,
        .num_rows = (size_t)num_rows,
        .top_k = (size_t)top_k,
        .num_slots = (size_t)num_slots,
        .hidden_size = (size_t)hidden_size,
        .intermediate_size = (size_t)intermediate_size,
        .num_threads = num_threads,
    };
    Py_BEGIN_ALLOW_THREADS
    status = moe_ffn(&moe);
    Py_END_ALLOW_THREADS
    return result_of(status);
}

static PyObject *py_attn_decode(PyObject *module, PyObject *arguments) {
    unsigned long long query, key_cache, value_cache, block_table, seq_lens, out;
    Py_ssize_t num_requests, num_heads, num_kv_heads, head_dim, num_blocks, block_size, max_blocks;
    Py_ssize_t sliding_window;
    float scale;
    unsigned num_threads;
    int status;
    if (!PyArg_ParseTuple(arguments, "KKKKKKnnnnnnnfnI", &query, &key_cache, &value_cache,
                          &block_table, &seq_lens, &out, &num_requests, &num_heads, &num_kv_heads,
                          &head_dim, &num_blocks, &block_size, &max_blocks, &scale,
                          &sliding_window, &num_threads))
        return NULL;
    const DecodeArguments decode = {
        .query = (const uint16_t *)query,
        .key_cache = (const uint16_t *)key_cache,
        .value_cache = (const uint16_t *)value_cache,
        .block_table = (const int64_t *)block_table,
        .seq_lens = (const int64_t *)seq_lens,
        .out = (uint16_t *)out,
        .scale = scale,
        .sliding_window = (size_t)sliding_window,
        .num_requests = (size_t)num_requests,
        .num_heads = (size_t)num_heads,
        .num_kv_heads = (size_t)num_kv_heads,
        .head_dim = (size_t)head_dim,
        .num_blocks = (size_t)num_blocks,
        .block_size = (size_t)block_size,
        .max_blocks = (size_t)max_blocks,
        .num_threads = num_threads,
    };
    Py_BEGIN_ALLOW_THREADS
    status = attn_decode(&decode);
    Py_END_ALLOW_THREADS
    return result_of(status);
}

static PyMethodDef methods[] = {
    {"supported", py_supported, METH_NOARGS, "Whether this CPU can run the operations."},
    {"linear", py_linear, METH_VARARGS, "See operations.h."},
    {"attn_decode", py_attn_decode, METH_VARARGS, "See operations.h."},
    {"moe_ffn", py_moe_ffn, METH_VARARGS, "See operations.h."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_size = 0,
                                        .m_methods = methods};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&definition); }
