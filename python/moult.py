"""libmoult from Python: the routed mixture-of-experts layer on numpy arrays and torch tensors, of the CPU or a GPU.

    moe = moult.Moe(hidden_size=2048, intermediate_size=768, num_experts=128, top_k=8,
                    routing_method=moult.ROUTE_RENORMALIZE)
    moe.set_weights(gate=moult.Matrices("nvfp4", data, scale, tensor_scale),
                    up=moult.Matrices(...), down=moult.Matrices(...))
    y = moe.run(x, logits=logits)                # fused
    y = moe.run(x, packed=packed)                # routed: int32, id << 16 | bits of a BF16 weight
    y = moe.run(x, topk_ids=ids, topk_weights=w)

On a GPU:

    moe = moult.Moe(..., device="cuda")          # or "cuda:1"
    moe.set_weights(...)                         # all arrays on the GPU, or all on the CPU
    y = moe.run(x, logits=logits)                # torch CUDA tensors; queued on torch's current stream

run() there neither allocates (but for its result, by torch) nor waits, and can be captured by torch.cuda.graph
with `out=` a tensor of the caller's.

Names, fields and meanings are those of include/moult_moe.h, without the prefix.  BF16 is torch.bfloat16,
ml_dtypes' bfloat16, or numpy uint16 holding the bits.  The result is of the kind of x (torch or numpy)
and of its type, or of `output_dtype` ("f32", "bf16").  Errors are moult.Error with .code.

The library is $MOULT_LIB, else build/libmoult.so beside this folder, else libmoult.so.1.
Needs numpy; torch only if tensors are passed.
"""
import ctypes
import os

import numpy as np

OK, ERR_INPUT, ERR_STATE, ERR_UNSUPPORTED, ERR_NOMEM, ERR_SYSTEM = range(6)
DEVICE_CPU, DEVICE_CUDA = range(2)
DTYPE_F32, DTYPE_BF16 = range(2)
(FORMAT_BF16, FORMAT_FP8_BLOCK, FORMAT_FP8_TENSOR, FORMAT_FP8_CHANNEL, FORMAT_MXFP8, FORMAT_NVFP4,
 FORMAT_MXFP4) = range(7)
ACT_BF16, ACT_FP8_BLOCK, ACT_MXFP8, ACT_NVFP4, ACT_NVFP4_PER_TOKEN = range(5)
(ROUTE_DEFAULT, ROUTE_RENORMALIZE, ROUTE_DEEPSEEK_V3, ROUTE_LLAMA4, ROUTE_RENORMALIZE_NAIVE, ROUTE_TOPK,
 ROUTE_SIGMOID_RENORM, ROUTE_MINIMAX2, ROUTE_SIGMOID, ROUTE_TOPK_SIGMOID) = range(10)
SWIGLU, SWIGLU_OAI = range(2)
GATE_AND_UP, FUSED_GATE_UP, FUSED_UP_GATE, FUSED_INTERLEAVED, RESIDENT = range(5)
TRTLLM_W13, TRTLLM_W2 = range(2)
PART_DATA, PART_SCALE, PART_BIAS = range(3)

FORMATS = {"bf16": 0, "fp8-block": 1, "fp8-tensor": 2, "fp8-channel": 3, "mxfp8": 4, "nvfp4": 5, "mxfp4": 6}

i32, i64, size_t, ptr, f32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_float


class _Error(ctypes.Structure):
    _fields_ = [("code", i32), ("message", ctypes.c_char * 1020)]


class _Config(ctypes.Structure):
    _fields_ = [("size", size_t), ("hidden_size", i32), ("intermediate_size", i32),
                ("num_experts", i32), ("top_k", i32), ("local_expert_offset", i32),
                ("local_num_experts", i32), ("routing_method", i32), ("n_group", i32),
                ("topk_group", i32), ("routed_scaling_factor", f32), ("norm_topk_prob", i32),
                ("activation", i32), ("weights_on_input", i32), ("activation_format", i32),
                ("max_tokens", i32), ("num_threads", i32), ("device", i32), ("isa", ctypes.c_char_p),
                ("gpu", i32), ("workspace", ptr), ("workspace_bytes", size_t)]


class _Matrices(ctypes.Structure):
    _fields_ = [("format", i32), ("data", ptr), ("scale", ptr), ("tensor_scale", ptr),
                ("input_scale", ptr)]


class _Weights(ctypes.Structure):
    _fields_ = [("size", size_t), ("arrangement", i32), ("device", i32), ("stream", ptr),
                ("gate", _Matrices), ("up", _Matrices), ("down", _Matrices), ("resident", ptr),
                ("gate_bias", ptr), ("up_bias", ptr), ("down_bias", ptr), ("alpha", ptr),
                ("beta", ptr), ("limit", ptr), ("input_scale_in", f32), ("input_scale_down", f32)]


class _Call(ctypes.Structure):
    _fields_ = [("size", size_t), ("num_tokens", i32), ("input_dtype", i32), ("output_dtype", i32),
                ("logits_dtype", i32), ("bias_dtype", i32), ("weights_dtype", i32), ("input", ptr),
                ("output", ptr), ("logits", ptr), ("routing_bias", ptr), ("replay_ids", ptr),
                ("packed", ptr), ("topk_ids", ptr), ("topk_weights", ptr), ("replay_out", ptr),
                ("packed_out", ptr), ("stream", ptr)]


class _MatrixOut(ctypes.Structure):
    _fields_ = [("data", ptr), ("scale", ptr), ("tensor_scale", ptr), ("input_scale", ptr)]


class _Trtllm(ctypes.Structure):
    _fields_ = [("size", size_t), ("format", i32), ("matrix", i32), ("part", i32), ("rows", i32),
                ("cols", i32), ("block_major", i32)]


class Error(Exception):
    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def _load():
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "build", "libmoult.so")
    path = os.environ.get("MOULT_LIB") or (here if os.path.exists(here) else "libmoult.so.1")
    lib = ctypes.CDLL(path)
    err = ctypes.POINTER(_Error)
    for name, args in {
        "moult_version": [],
        "moult_moe_create": [ctypes.POINTER(ptr), ctypes.POINTER(_Config), err],
        "moult_moe_workspace_bytes": [ctypes.POINTER(size_t), ctypes.POINTER(_Config), err],
        "moult_moe_set_weights": [ptr, ctypes.POINTER(_Weights), err],
        "moult_moe_run": [ptr, ctypes.POINTER(_Call), err],
        "moult_resident_bytes": [ctypes.POINTER(size_t), i32, i64, i64, err],
        "moult_pack": [ptr, ctypes.POINTER(_Matrices), i64, i64, err],
        "moult_unpack": [ctypes.POINTER(_MatrixOut), i32, i64, i64, ptr, err],
        "moult_gpu_resident_bytes": [ctypes.POINTER(size_t), i32, i64, i64, err],
        "moult_gpu_pack": [ptr, ptr, ctypes.POINTER(_Matrices), i64, i64, ptr, err],
        "moult_gpu_unpack": [ptr, ctypes.POINTER(_MatrixOut), i32, i64, i64, ptr, ptr, err],
        "moult_trtllm_bytes": [ctypes.POINTER(size_t), ctypes.POINTER(_Trtllm), err],
        "moult_trtllm_export": [ptr, ctypes.POINTER(_Trtllm), ptr, ptr, err],
        "moult_trtllm_import": [ptr, ptr, ctypes.POINTER(_Trtllm), ptr, err],
    }.items():
        f = getattr(lib, name)
        f.argtypes, f.restype = args, i32
    lib.moult_moe_destroy.argtypes, lib.moult_moe_destroy.restype = [ptr], None
    return lib


_lib = _load()


def _call(f, *args):
    err = _Error()
    code = f(*args, ctypes.byref(err))
    if code != OK:
        raise Error(code, err.message.decode("utf-8", "replace"))


def version():
    return _lib.moult_version()


def _is_torch(x):
    return type(x).__module__.split(".")[0] == "torch"


class _Array:
    """A dense view of an array or tensor (a copy where it is strided), kept alive with its address."""

    def __init__(self, x, *dtypes, device="cpu"):
        at = str(x.device) if _is_torch(x) else "cpu"
        if at != device:
            raise Error(ERR_UNSUPPORTED, f"device: {at}; allowed: {device}")
        if _is_torch(x):
            self.keep = x.detach().contiguous()
            self.dtype = str(self.keep.dtype).replace("torch.", "")
            self.address = self.keep.data_ptr()
            self.bytes = self.keep.numel() * self.keep.element_size()
        else:
            self.keep = np.ascontiguousarray(x)
            self.dtype = self.keep.dtype.name
            self.address = self.keep.ctypes.data
            self.bytes = self.keep.nbytes
        self.shape = tuple(self.keep.shape)
        if dtypes and self.dtype not in dtypes:
            raise Error(ERR_INPUT, f"dtype: {self.dtype}; allowed: {', '.join(dtypes)}")


_FLOATS = {"float32": DTYPE_F32, "bfloat16": DTYPE_BF16, "uint16": DTYPE_BF16}


class _Keep:
    """Addresses for one call, all of one device; the arrays live as long as this object."""

    def __init__(self, device="cpu"):
        self.arrays, self.device = [], device

    def bytes(self, x, n, name):
        """Any dtype, exactly n bytes."""
        if x is None:
            return None
        a = _Array(x, device=self.device)
        if a.bytes != n:
            raise Error(ERR_INPUT, f"{name}: {a.bytes} bytes; expected {n}")
        self.arrays.append(a)
        return a.address

    def typed(self, x, shape, name, *dtypes):
        if x is None:
            return None
        a = _Array(x, *dtypes, device=self.device)
        if a.shape != tuple(shape):
            raise Error(ERR_INPUT, f"{name}: shape {a.shape}; expected {tuple(shape)}")
        self.arrays.append(a)
        return a.address

    def floats(self, x, shape, name):
        if x is None:
            return None, 0
        a = _Array(x, *_FLOATS, device=self.device)
        if a.shape != tuple(shape):
            raise Error(ERR_INPUT, f"{name}: shape {a.shape}; expected {tuple(shape)}")
        self.arrays.append(a)
        return a.address, _FLOATS[a.dtype]


def _ceil(a, b):
    return -(-a // b)


def _format(name):
    if isinstance(name, int):
        return name
    key = name.lower().replace("_", "-")
    if key not in FORMATS:
        raise Error(ERR_INPUT, f"format: {name}; allowed: {', '.join(FORMATS)}")
    return FORMATS[key]


def canonical_bytes(format, rows, cols):
    """Bytes of data and of scales of one matrix."""
    f = _format(format)
    data = rows * (cols * 2 if f == FORMAT_BF16 else _ceil(cols, 2) if f >= FORMAT_NVFP4 else cols)
    scale = [0, 4 * _ceil(rows, 128) * _ceil(cols, 128), 4, 4 * rows, rows * _ceil(cols, 32),
             rows * _ceil(cols, 16), rows * _ceil(cols, 32)][f]
    return data, scale


class Matrices:
    """The same matrix of every local expert: data, scale [experts, ...], tensor_scale [experts]."""

    def __init__(self, format, data, scale=None, tensor_scale=None, input_scale=None):
        self.format, self.data, self.scale = _format(format), data, scale
        self.tensor_scale, self.input_scale = tensor_scale, input_scale

    def _fill(self, keep, name, experts, rows, cols, pair):
        data, scale = canonical_bytes(self.format, rows, cols)
        scalars = (experts, 2) if pair else (experts,)
        return _Matrices(self.format, keep.bytes(self.data, experts * data, name + ".data"),
                         keep.bytes(self.scale, experts * scale, name + ".scale"),
                         keep.typed(self.tensor_scale, scalars, name + ".tensor_scale", "float32"),
                         keep.typed(self.input_scale, scalars, name + ".input_scale", "float32"))


def _config(hidden_size, intermediate_size, num_experts, top_k, isa, device, fields):
    """The struct, and where its handle computes: "cpu", "cuda:0", ..."""
    c = _Config(size=ctypes.sizeof(_Config), hidden_size=hidden_size, intermediate_size=intermediate_size,
                num_experts=num_experts, top_k=top_k, isa=isa.encode() if isa else None)
    known = {n for n, _ in _Config._fields_}
    for k, v in fields.items():
        if k not in known:
            raise TypeError(f"Moe has no field {k}")
        setattr(c, k, v)
    if isinstance(device, int):
        c.device = device
    elif str(device) != "cpu":
        kind, _, gpu = str(device).partition(":")
        if kind != "cuda" or not (gpu or "0").isdigit():
            raise Error(ERR_INPUT, f"device: {device}; allowed: cpu, cuda, cuda:N")
        c.device, c.gpu = DEVICE_CUDA, int(gpu or c.gpu)
    return c, f"cuda:{c.gpu}" if c.device == DEVICE_CUDA else "cpu"


def workspace_bytes(hidden_size, intermediate_size, num_experts, top_k, isa=None, device="cpu", **fields):
    """GPU memory that Moe of the same arguments takes to work in; weights come on top."""
    c, _ = _config(hidden_size, intermediate_size, num_experts, top_k, isa, device, fields)
    n = size_t()
    _call(_lib.moult_moe_workspace_bytes, ctypes.byref(n), ctypes.byref(c))
    return n.value


class Moe:
    def __init__(self, hidden_size, intermediate_size, num_experts, top_k, isa=None, device="cpu", **fields):
        """`workspace`: a torch tensor of at least workspace_bytes() bytes on the GPU; else the library's own."""
        work = fields.pop("workspace", None)
        c, self.device = _config(hidden_size, intermediate_size, num_experts, top_k, isa, device, fields)
        self._moe, self._work = ptr(), None
        if work is not None:
            self._work = _Array(work, device=self.device)
            c.workspace, c.workspace_bytes = self._work.address, self._work.bytes
        _call(_lib.moult_moe_create, ctypes.byref(self._moe), ctypes.byref(c))
        self.config = c
        self.experts = c.local_num_experts or c.num_experts
        self._resident = None

    def _stream(self):
        if self.device == "cpu":
            return None
        import torch
        return torch.cuda.current_stream(self.device).cuda_stream

    def close(self):
        if self._moe:
            _lib.moult_moe_destroy(self._moe)
            self._moe = ptr()

    def __del__(self):
        if getattr(self, "_moe", None):
            self.close()

    def set_weights(self, gate=None, up=None, down=None, arrangement=GATE_AND_UP, resident=None,
                    gate_bias=None, up_bias=None, down_bias=None, alpha=None, beta=None, limit=None,
                    input_scale_in=0.0, input_scale_down=0.0):
        """`resident`: arrays from pack() (of this class, on a GPU), [experts][gate, up, down]; the formats are
        those of the Matrices given as gate, up, down, whose data may be None."""
        at = resident[0][0] if arrangement == RESIDENT else gate.data
        on_gpu = self.device != "cpu" and _is_torch(at) and at.device.type == "cuda"
        keep, n = _Keep(self.device if on_gpu else "cpu"), self.experts
        h, i = self.config.hidden_size, self.config.intermediate_size
        fused = arrangement in (FUSED_GATE_UP, FUSED_UP_GATE, FUSED_INTERLEAVED)
        w = _Weights(size=ctypes.sizeof(_Weights), arrangement=arrangement, device=int(on_gpu),
                     stream=self._stream())
        if arrangement == RESIDENT:
            for name, m in (("gate", gate), ("up", up), ("down", down)):
                getattr(w, name).format = m.format
            flat = [_Array(r, device=keep.device) for expert in resident for r in expert]
            table = (ptr * len(flat))(*[a.address for a in flat])
            w.resident = ctypes.cast(table, ptr)
            keep.arrays += [flat, table]
        else:
            rows = 2 * i if fused else i
            w.gate = gate._fill(keep, "gate", n, rows, h, fused)
            if up is not None:
                w.up = up._fill(keep, "up", n, i, h, False)
            w.down = down._fill(keep, "down", n, h, i, False)
        w.gate_bias = keep.typed(gate_bias, (n, 2 * i if fused else i), "gate_bias", "float32")
        w.up_bias = keep.typed(up_bias, (n, i), "up_bias", "float32")
        w.down_bias = keep.typed(down_bias, (n, h), "down_bias", "float32")
        w.alpha = keep.typed(alpha, (n,), "alpha", "float32")
        w.beta = keep.typed(beta, (n,), "beta", "float32")
        w.limit = keep.typed(limit, (n,), "limit", "float32")
        w.input_scale_in, w.input_scale_down = input_scale_in, input_scale_down
        _call(_lib.moult_moe_set_weights, self._moe, ctypes.byref(w))
        self._resident = keep if arrangement == RESIDENT else None

    def run(self, x, logits=None, routing_bias=None, replay_ids=None, packed=None, topk_ids=None,
            topk_weights=None, output_dtype=None, replay_out=None, packed_out=None, out=None):
        """replay_out (int16) and packed_out (int32): numpy arrays [tokens, top_k] (on a GPU tensors) to be
        filled; out: the same for the result, float32 or bfloat16."""
        keep, c = _Keep(self.device), _Call(size=ctypes.sizeof(_Call), stream=self._stream())
        n, h, k = int(x.shape[0]), self.config.hidden_size, self.config.top_k
        c.num_tokens = n
        c.input, c.input_dtype = keep.floats(x, (n, h), "x")
        c.output_dtype = c.input_dtype if output_dtype is None else {"f32": 0, "bf16": 1}[output_dtype]
        c.logits, c.logits_dtype = keep.floats(logits, (n, self.config.num_experts), "logits")
        c.routing_bias, c.bias_dtype = keep.floats(routing_bias, (self.config.num_experts,),
                                                   "routing_bias")
        c.replay_ids = keep.typed(replay_ids, (n, k), "replay_ids", "int16")
        c.packed = keep.typed(packed, (n, k), "packed", "int32")
        c.topk_ids = keep.typed(topk_ids, (n, k), "topk_ids", "int32")
        c.topk_weights, c.weights_dtype = keep.floats(topk_weights, (n, k), "topk_weights")
        c.replay_out = self._filled(keep, replay_out, (n, k), "replay_out", "int16")
        c.packed_out = self._filled(keep, packed_out, (n, k), "packed_out", "int32")
        if out is None:
            out = self._empty(x, (n, h), c.output_dtype)
        c.output = self._filled(keep, out, (n, h), "out", *_FLOATS)
        c.output_dtype = _FLOATS[keep.arrays[-1].dtype]
        _call(_lib.moult_moe_run, self._moe, ctypes.byref(c))
        return out

    def _empty(self, x, shape, bf16):
        if not _is_torch(x):
            return np.empty(shape, np.uint16 if bf16 else np.float32)
        import torch
        return torch.empty(shape, dtype=torch.bfloat16 if bf16 else torch.float32, device=x.device)

    def _filled(self, keep, a, shape, name, *dtypes):
        """The address of an array that is written: never of a copy."""
        if a is None:
            return None
        address = keep.typed(a, shape, name, *dtypes)
        if address != (a.data_ptr() if _is_torch(a) else a.ctypes.data):
            raise Error(ERR_INPUT, f"{name}: a dense array is needed")
        return address

    def pack(self, format, rows, cols, data, scale=None, tensor_scale=None, input_scale=None):
        """One matrix (all on the CPU or all on the GPU) to its resident form on the GPU, a uint8 tensor."""
        import torch
        keep, n = _Keep(str(data.device) if _is_torch(data) else "cpu"), size_t()
        one = [None if v is None else v.reshape(1) if _is_torch(v) else _scalar(v) for v in (tensor_scale, input_scale)]
        m = Matrices(format, data, scale, *one)._fill(keep, "matrix", 1, rows, cols, False)
        _call(_lib.moult_gpu_resident_bytes, ctypes.byref(n), m.format, rows, cols)
        out = torch.empty(n.value, dtype=torch.uint8, device=self.device)
        _call(_lib.moult_gpu_pack, self._moe, out.data_ptr(), ctypes.byref(m), rows, cols, self._stream())
        return out

    def unpack(self, format, rows, cols, resident):
        """(data, scale, tensor_scale, input_scale) of a tensor from pack(): uint8 tensors on the GPU and floats."""
        import torch
        f, sizes = _format(format), canonical_bytes(format, rows, cols)
        data, scale = (torch.empty(n, dtype=torch.uint8, device=self.device) for n in sizes)
        scalars = np.full(2, np.nan, np.float32)
        a = scalars.ctypes.data
        out = _MatrixOut(data.data_ptr(), scale.data_ptr() if sizes[1] else None, a, a + 4)
        _call(_lib.moult_gpu_unpack, self._moe, ctypes.byref(out), f, rows, cols,
              _Array(resident, device=self.device).address, self._stream())
        return data, scale, float(scalars[0]), float(scalars[1])


def resident_bytes(format, rows, cols):
    n = size_t()
    _call(_lib.moult_resident_bytes, ctypes.byref(n), _format(format), rows, cols)
    return n.value


def _scalar(x):
    """A number, or an array or tensor of one, as float32 [1]."""
    return np.array([x.item() if hasattr(x, "item") else x], np.float32)


def pack(format, rows, cols, data, scale=None, tensor_scale=None, input_scale=None):
    """One matrix to its resident form, a uint8 array."""
    keep = _Keep()
    m = Matrices(format, data, scale, None if tensor_scale is None else _scalar(tensor_scale),
                 None if input_scale is None else _scalar(input_scale))
    out = np.empty(resident_bytes(format, rows, cols) + 64, np.uint8)
    out = out[-out.ctypes.data % 64:][:out.size - 64]  # kernels read aligned panels
    _call(_lib.moult_pack, out.ctypes.data, ctypes.byref(m._fill(keep, "matrix", 1, rows, cols, False)), rows,
          cols)
    return out


def unpack(format, rows, cols, resident):
    """(data, scale, tensor_scale, input_scale): uint8 arrays and floats; NaN: no input scale."""
    f, (d, s) = _format(format), canonical_bytes(format, rows, cols)
    data, scale, scalars = np.zeros(d, np.uint8), np.zeros(s, np.uint8), np.full(2, np.nan, np.float32)
    a = scalars.ctypes.data
    out = _MatrixOut(data.ctypes.data, scale.ctypes.data, a, a + 4)
    _call(_lib.moult_unpack, ctypes.byref(out), f, rows, cols, _Array(resident).address)
    return data, scale, float(scalars[0]), float(scalars[1])


def _trtllm(format, matrix, part, rows, cols, block_major):
    t = _Trtllm(ctypes.sizeof(_Trtllm), _format(format), matrix, part, rows, cols, int(block_major))
    n = size_t()
    _call(_lib.moult_trtllm_bytes, ctypes.byref(n), ctypes.byref(t))
    f, (d, s) = _format(format), canonical_bytes(format, rows, cols)
    return t, n.value, [d, s, 4 * rows][part]


def trtllm_export(format, matrix, part, rows, cols, gate, up=None, block_major=False):
    """Stored bytes (uint8) of one expert's part; w13: gate and up, w2: gate alone."""
    t, n, canonical = _trtllm(format, matrix, part, rows, cols, block_major)
    keep, out = _Keep(), np.zeros(n, np.uint8)
    _call(_lib.moult_trtllm_export, out.ctypes.data, ctypes.byref(t), keep.bytes(gate, canonical, "gate"),
          keep.bytes(up, canonical, "up"))
    return out


def trtllm_import(format, matrix, part, rows, cols, stored, block_major=False):
    """(gate, up) or (matrix, None) as uint8."""
    t, n, canonical = _trtllm(format, matrix, part, rows, cols, block_major)
    keep, gate = _Keep(), np.zeros(canonical, np.uint8)
    up = np.zeros(canonical, np.uint8) if matrix == TRTLLM_W13 else None
    _call(_lib.moult_trtllm_import, gate.ctypes.data, up.ctypes.data if up is not None else None,
          ctypes.byref(t), keep.bytes(stored, n, "stored"))
    return gate, up
