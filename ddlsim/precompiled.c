/* Calls precompiled kernels (ddlsim/precompile.py) from Python, without numba.

A `Kernel` compares its arguments with the signatures for which it was compiled. If one fits, the kernel's machine code
is called; otherwise the attribute `dispatcher` is, which is numba's. Only the stable ABI of Python is used, and the
public fields of NumPy arrays, whose layout is the same in NumPy 1 and 2.

`precompiled_table.h` is generated. It defines STAMP, DTYPES, N_DTYPES, SIGNATURES and N_SIGNATURES. */

#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { INTEGER, REAL, BOOLEAN, ARRAY, TUPLE };
enum { MAX_WORDS = 256, MAX_RESULTS = 8, MAX_EQUAL = 4 };

typedef struct {
    const char *name;        /* module and qualified name of the Python function */
    const int32_t *kinds;    /* per argument: kind; for arrays also dtype, ndim, whether it is written to; for tuples n */
    int32_t n_args;
    const char *results;     /* a letter each: i(nteger), r(eal), b(oolean); empty: None */
    int32_t (*call)(int64_t *words, int64_t *results);
    void *address;           /* for other compiled code; NULL if there is none */
    int32_t without_gil;
} Signature;

#include "precompiled_table.h"

/* The beginning of PyArrayObject_fields (numpy/ndarraytypes.h). */
typedef struct {
    PyObject_HEAD
    char *data;
    int nd;
    Py_ssize_t *dimensions;
    Py_ssize_t *strides;
    PyObject *base;
    PyObject *descr;
    int flags;
} Array;

enum { C_CONTIGUOUS = 0x0001, ALIGNED = 0x0100, WRITEABLE = 0x0400 };

static PyObject *array_type, *int64_type, *float64_type, *bool_type;
static PyObject *dtypes[N_DTYPES][MAX_EQUAL]; /* objects that are equal, so that comparing them is quick */

typedef struct {
    PyObject_HEAD
    const Signature *signatures;
    int n_signatures;
} Kernel;

/* Returns whether an array has a dtype. */
static int has_dtype(PyObject *descr, int32_t dtype) {
    PyObject **known = dtypes[dtype];
    for (int i = 0; i < MAX_EQUAL && known[i]; i++)
        if (known[i] == descr) return 1;
    int equal = PyObject_RichCompareBool(descr, known[0], Py_EQ);
    if (equal < 0) PyErr_Clear();
    if (equal <= 0) return 0;
    for (int i = 1; i < MAX_EQUAL; i++)
        if (!known[i]) {
            Py_INCREF(descr);
            known[i] = descr;
            break;
        }
    return 1;
}

/* Writes an argument to *words and moves *kinds and *words behind it; returns whether it is of that kind. */
static int put(PyObject *arg, const int32_t **kinds, int64_t **words) {
    PyObject *type = (PyObject *)Py_TYPE(arg);
    switch (*(*kinds)++) {
    case INTEGER: {
        if (type != (PyObject *)&PyLong_Type && type != int64_type) return 0;
        PyObject *number = PyNumber_Index(arg);
        long long value = number ? PyLong_AsLongLong(number) : -1;
        Py_XDECREF(number);
        if (value == -1 && PyErr_Occurred()) {
            PyErr_Clear();
            return 0;
        }
        *(*words)++ = value;
        return 1;
    }
    case REAL: {
        if (type != (PyObject *)&PyFloat_Type && type != float64_type) return 0;
        double value = PyFloat_AsDouble(arg);
        memcpy((*words)++, &value, sizeof value);
        return 1;
    }
    case BOOLEAN: {
        if (type != (PyObject *)&PyBool_Type && type != bool_type) return 0;
        *(*words)++ = PyObject_IsTrue(arg);
        return 1;
    }
    case ARRAY: {
        const Array *array = (const Array *)arg;
        const int32_t *wanted = *kinds;
        if (type != array_type || array->nd != wanted[1]) return 0;
        int flags = C_CONTIGUOUS | ALIGNED | (wanted[2] ? WRITEABLE : 0);
        if ((array->flags & flags) != flags || !has_dtype(array->descr, wanted[0])) return 0;
        *kinds += 3;
        *(*words)++ = (int64_t)(intptr_t)array->data;
        for (int i = 0; i < array->nd; i++) *(*words)++ = array->dimensions[i];
        return 1;
    }
    default: { /* TUPLE */
        int32_t n = *(*kinds)++;
        if (type != (PyObject *)&PyTuple_Type || PyTuple_Size(arg) != n) return 0;
        for (int32_t i = 0; i < n; i++)
            if (!put(PyTuple_GetItem(arg, i), kinds, words)) return 0;
        return 1;
    }
    }
}

static PyObject *result(char letter, int64_t word) {
    double value;
    switch (letter) {
    case 'r':
        memcpy(&value, &word, sizeof value);
        return PyFloat_FromDouble(value);
    case 'b':
        return PyBool_FromLong(word != 0);
    default:
        return PyLong_FromLongLong(word);
    }
}

static PyObject *run(const Signature *signature, int64_t *words) {
    int64_t results[MAX_RESULTS];
    int32_t status;
    if (signature->without_gil) {
        PyThreadState *state = PyEval_SaveThread();
        status = signature->call(words, results);
        PyEval_RestoreThread(state);
    } else {
        status = signature->call(words, results);
    }
    if (status) return PyErr_Format(PyExc_RuntimeError, "the compiled function %s failed", signature->name);
    size_t n = strlen(signature->results);
    if (n == 0) {
        Py_INCREF(Py_None);
        return Py_None;
    }
    if (n == 1) return result(signature->results[0], results[0]);
    PyObject *tuple = PyTuple_New((Py_ssize_t)n);
    for (size_t i = 0; tuple && i < n; i++) {
        PyObject *item = result(signature->results[i], results[i]);
        if (!item) {
            Py_DECREF(tuple);
            return NULL;
        }
        PyTuple_SetItem(tuple, (Py_ssize_t)i, item);
    }
    return tuple;
}

static PyObject *kernel_call(PyObject *self, PyObject *args, PyObject *keywords) {
    const Kernel *kernel = (const Kernel *)self;
    if (!keywords) {
        Py_ssize_t n = PyTuple_Size(args);
        for (int k = 0; k < kernel->n_signatures; k++) {
            const Signature *signature = &kernel->signatures[k];
            if (signature->n_args != n) continue;
            int64_t words[MAX_WORDS], *word = words;
            const int32_t *kind = signature->kinds;
            Py_ssize_t i = 0;
            while (i < n && put(PyTuple_GetItem(args, i), &kind, &word)) i++;
            if (i == n) return run(signature, words);
        }
    }
    PyObject *dispatcher = PyObject_GetAttrString(self, "dispatcher");
    if (!dispatcher) return NULL;
    PyObject *returned = PyObject_Call(dispatcher, args, keywords);
    Py_DECREF(dispatcher);
    return returned;
}

static int kernel_init(PyObject *self, PyObject *args, PyObject *keywords) {
    Kernel *kernel = (Kernel *)self;
    const char *name;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "s", &name)) return -1;
    kernel->signatures = NULL;
    kernel->n_signatures = 0;
    for (int i = 0; i < N_SIGNATURES; i++)
        if (!strcmp(SIGNATURES[i].name, name)) {
            if (!kernel->n_signatures) kernel->signatures = &SIGNATURES[i];
            kernel->n_signatures++;
        }
    return 0;
}

static PyObject *kernel_address(PyObject *self, void *closure) {
    const Kernel *kernel = (const Kernel *)self;
    (void)closure;
    if (!kernel->n_signatures || !kernel->signatures[0].address) {
        Py_INCREF(Py_None);
        return Py_None;
    }
    return PyLong_FromVoidPtr(kernel->signatures[0].address);
}

static PyObject *kernel_count(PyObject *self, void *closure) {
    (void)closure;
    return PyLong_FromLong(((const Kernel *)self)->n_signatures);
}

static void kernel_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyGetSetDef kernel_getset[] = {
    {"address", kernel_address, NULL, "Address for other compiled code; None if there is none.", NULL},
    {"n_signatures", kernel_count, NULL, "Number of signatures for which it was compiled.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot kernel_slots[] = {
    {Py_tp_call, kernel_call},
    {Py_tp_init, kernel_init},
    {Py_tp_dealloc, kernel_free},
    {Py_tp_getset, kernel_getset},
    {Py_tp_doc, "Kernel(name): a precompiled function; `dispatcher` is called for other types of arguments."},
    {0, NULL},
};

static PyType_Spec kernel_spec = {
    "ddlsim._precompiled.Kernel", sizeof(Kernel), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, kernel_slots,
};

/* Of numba's runtime, what kernels with arrays of their own need (numba/core/runtime/nrt.h). */
typedef struct {
    size_t references;
    void (*destroy)(void *, size_t, void *);
    void *destroy_info;
    void *data;
    size_t size;
    void *allocator;
} MemInfo;

__attribute__((visibility("hidden"))) void *NRT_MemInfo_alloc_aligned(size_t size, uint32_t align) {
    size_t unit = align < sizeof(void *) ? sizeof(void *) : align, head = (sizeof(MemInfo) + unit - 1) / unit * unit;
    void *memory;
    if (posix_memalign(&memory, unit, head + size)) return NULL;
    MemInfo *info = memory;
    memset(info, 0, sizeof *info);
    info->references = 1;
    info->data = (char *)memory + head;
    info->size = size;
    return info;
}

__attribute__((visibility("hidden"))) void NRT_MemInfo_call_dtor(MemInfo *info) { free(info); }

__attribute__((visibility("hidden"))) void NRT_Free(void *memory) { free(memory); }

/* start(ndarray, int64, float64, bool_, dtypes): what arguments are compared with. */
static PyObject *start(PyObject *module, PyObject *args) {
    PyObject *list;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOO", &array_type, &int64_type, &float64_type, &bool_type, &list)) return NULL;
    if (PyList_Size(list) != N_DTYPES) return PyErr_Format(PyExc_ValueError, "expected %d dtypes", N_DTYPES);
    Py_INCREF(array_type);
    Py_INCREF(int64_type);
    Py_INCREF(float64_type);
    Py_INCREF(bool_type);
    for (int i = 0; i < N_DTYPES; i++) {
        dtypes[i][0] = PyList_GetItem(list, i);
        Py_INCREF(dtypes[i][0]);
    }
    Py_INCREF(Py_None);
    return Py_None;
}

/* fields(array) -> (address, shape): how this module reads arrays, to be compared with what NumPy says. */
static PyObject *fields(PyObject *module, PyObject *arg) {
    (void)module;
    const Array *array = (const Array *)arg;
    PyObject *shape = PyTuple_New(array->nd);
    for (int i = 0; shape && i < array->nd; i++) PyTuple_SetItem(shape, i, PyLong_FromSsize_t(array->dimensions[i]));
    return Py_BuildValue("(KNOi)", (unsigned long long)(uintptr_t)array->data, shape, array->descr, array->flags);
}

static PyMethodDef methods[] = {
    {"start", start, METH_VARARGS, "start(ndarray, int64, float64, bool_, dtypes): set what arguments are compared with."},
    {"fields", fields, METH_O, "fields(array) -> (address, shape, dtype, flags) as this module reads them."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "ddlsim._precompiled", "Kernels as machine code.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__precompiled(void) {
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = PyType_FromSpec(&kernel_spec), *list = PyList_New(0);
    if (!module || !type || !list) return NULL;
    for (int i = 0; i < N_DTYPES; i++) PyList_Append(list, PyUnicode_FromString(DTYPES[i]));
    __builtin_cpu_init();
    int supported = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi")
                    && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt")
                    && __builtin_cpu_supports("x86-64-v3");
    if (PyModule_AddObject(module, "Kernel", type) || PyModule_AddObject(module, "DTYPES", list)
        || PyModule_AddStringConstant(module, "STAMP", STAMP) || PyModule_AddIntConstant(module, "SUPPORTED", supported)
        || PyModule_AddIntConstant(module, "N_SIGNATURES", N_SIGNATURES))
        return NULL;
    return module;
}
