"""`moult quantize` and `moult inspect` against an oracle in numpy: every format and spelling, there and back."""
import filecmp
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

from harness import FINAL, MOULT, SLOW, Server

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
try:
    import numpy as np
    import checkpoint_oracle as oracle
except ImportError:
    np = None
    print("skip    test_quantize: needs numpy")

TINY = "../shared/models/tiny-moe"
# format, spelling, the rule that is its default
FORMS = [
    ("fp8-block", "hf", "amax"), ("fp8-block", "miles", "amax"), ("fp8-block", "modelopt", "amax"),
    ("fp8-block", "compressed-tensors", "amax"), ("fp8-tensor", "hf", "amax"),
    ("fp8-tensor", "modelopt", "amax"), ("fp8-tensor", "compressed-tensors", "amax"),
    ("fp8-channel", "modelopt", "amax"), ("fp8-channel", "compressed-tensors", "amax"),
    ("mxfp8", "miles", "round-up"), ("mxfp8", "modelopt", "round-up"),
    ("mxfp8", "compressed-tensors", "round-up"), ("nvfp4", "modelopt", "modelopt"),
    ("nvfp4", "miles", "transformer-engine"), ("nvfp4", "compressed-tensors", "compressed-tensors"),
    ("mxfp4", "compressed-tensors", "round-up"),
]


def run(*args, rc=0, **k):
    r = subprocess.run([MOULT, *args], capture_output=True, text=True, timeout=600, **k)
    assert r.returncode == rc, (args, r.returncode, r.stdout, r.stderr)
    return r.stdout if rc == 0 else r.stderr


class Folder:
    """A temporary folder; f("name") is a path in it."""

    def __enter__(self):
        self.dir = tempfile.mkdtemp(prefix="moult-quantize-")
        return self

    def __call__(self, name):
        return os.path.join(self.dir, name)

    def __exit__(self, *_):
        shutil.rmtree(self.dir)


def inspect(path, rc=0):
    r = subprocess.run([MOULT, "inspect", path, "--json"], capture_output=True, text=True)
    assert r.returncode == rc, (path, r.returncode, r.stdout, r.stderr)
    return json.loads(r.stdout)


def layers_of(report, module, fmt):
    return [r["layers"] for r in report["modules"] if r["module"] == module and r["format"] == fmt]


def config(path):
    return json.load(open(os.path.join(path, "config.json"))).get("quantization_config")


def shared(module):
    """Modules that share a tensor scale with this one."""
    head, tail = module.rsplit(".", 1)
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
        if tail in group:
            return [head + "." + t for t in group]
    return [module]


def check_values(folder, fmt, rule, source, excluded=lambda m: False):
    """Every matrix decodes to what the rule says of the source, every other tensor is unchanged."""
    got = oracle.weights(folder)
    assert got.keys() == source.keys()
    n = 0
    for module, (x, kind) in got.items():
        w = source[module][0]
        linear = module.endswith("_proj") and not excluded(module)
        if not linear:
            assert kind == "bf16" and (x == w).all(), module
            continue
        amax = max(np.abs(source[m][0]).max() for m in shared(module))
        want = oracle.expected(w, fmt, rule, amax)
        assert kind == fmt, (module, kind)
        assert (x == want).all(), (module, np.argwhere(x != want)[:4])
        n += 1
    return n


def test_every_format_and_spelling():
    if np is None:
        return
    source = oracle.weights(FINAL)
    for fmt, spelling, rule in FORMS[::5] if SLOW else FORMS:
        with Folder() as f:
            run("quantize", FINAL, f("a"), "--format", fmt, "--spelling", spelling)
            miles = spelling == "miles" and fmt == "nvfp4"
            n = check_values(f("a"), fmt, rule, source,
                             lambda m: miles and ".experts." not in m)
            assert n == (144 if miles else 156), n
            report = inspect(f("a"))
            assert report["odd"] == [] and layers_of(report, "experts", fmt) == [[0, 1, 2]]
            for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
                assert filecmp.cmp(os.path.join(FINAL, name), f("a/" + name), False)
            # Back to BF16 through the program's own reader: the decoded values, rounded once more.
            run("quantize", f("a"), f("b"), "--format", "bf16", "--requantize")
            assert config(f("b")) is None
            back, decoded = oracle.read(f("b")), oracle.weights(f("a"))
            for module, (x, _) in decoded.items():
                want = oracle.to_bf16(x.astype(np.float32))
                assert (back[module + ".weight"][1] == want).all(), (fmt, spelling, module)


def test_the_files_of_other_tools():
    """The same options as an independent tool used give its tensors."""
    if np is None or not os.path.isdir(TINY):
        print("skip    test_the_files_of_other_tools: needs numpy and ../shared/models/tiny-moe")
        return
    with Folder() as f:
        run("quantize", TINY + "/final", f("mx"), "--format", "mxfp8", "--bf16-last-n", "1")
        run("quantize", TINY + "/final", f("fp8"), "--format", "fp8-block", "--rule", "amax-bf16")
        run("quantize", TINY + "/nvfp4", f("nv"), "--format", "nvfp4", "--requantize")
        for ours, theirs in (("mx", "mxfp8-last1-bf16"), ("fp8", "fp8"), ("nv", "nvfp4")):
            a, b = oracle.read(f(ours)), oracle.read(TINY + "/" + theirs)
            assert a.keys() == b.keys()
            for name in a:
                assert a[name][0] == b[name][0] and a[name][1].tobytes() == b[name][1].tobytes(), name
            x, y = config(f(ours)), config(TINY + "/" + theirs)
            for key in ("quant_method", "quant_algo", "weight_block_size", "fmt", "scale_fmt",
                        "activation_scheme"):
                assert x.get(key) == y.get(key), key
            lists = [sorted(c.get("modules_to_not_convert", c.get("ignore"))) for c in (x, y)]
            assert lists[0] == lists[1], lists


def test_requantize():
    """From one format to another, through the decoded values; to another spelling, the same codes."""
    if np is None:
        return
    with Folder() as f:
        run("quantize", FINAL, f("a"), "--format", "nvfp4")
        error = run("quantize", f("a"), f("x"), "--format", "mxfp8", rc=1)
        assert "--requantize" in error and "nvfp4" in error, error
        source = oracle.weights(f("a"))
        for fmt, rule in (("mxfp8", "round-up"), ("fp8-block", "amax"), ("mxfp4", "round-up")):
            run("quantize", f("a"), f(fmt), "--format", fmt, "--requantize")
            # The program decodes to f32 first.
            rounded = {m: (x.astype(np.float32).astype(np.float64), k) for m, (x, k) in source.items()}
            check_values(f(fmt), fmt, rule, rounded)
        run("quantize", f("mxfp8"), f("respelled"), "--format", "mxfp8", "--spelling", "modelopt", "--requantize")
        a, b = oracle.read(f("mxfp8")), oracle.read(f("respelled"))
        for name in a:
            other = name.replace("_scale_inv", "_scale")
            assert a[name][1].tobytes() == b[other][1].tobytes(), name
        assert inspect(f("respelled"))["quantization"] == "modelopt MXFP8"


def test_exclusions():
    """What each option leaves in BF16, as the reader finds it and as the config lists it."""
    if np is None:
        return
    layer1 = {"hf": "model.layers.1.", "miles": "model.layers.1.", "modelopt": "model.layers.1.*",
              "compressed-tensors": "re:^model\\.layers\\.1\\."}
    with Folder() as f:
        for fmt, spelling in (("fp8-block", "hf"), ("mxfp8", "miles"), ("nvfp4", "modelopt"),
                              ("nvfp4", "miles"), ("nvfp4", "compressed-tensors")):
            d = f(fmt + spelling)
            run("quantize", FINAL, d, "--format", fmt, "--spelling", spelling, "--exclude", "layers.1",
                "--exclude", "*experts.3.*")
            report, c = inspect(d), config(d)
            assert report["odd"] == [] and layers_of(report, "experts", fmt) == [[0, 2]], report
            assert layers_of(report, "experts", "bf16") == [[0, 1, 2]]
            names = c.get("modules_to_not_convert", c.get("ignore"))
            assert layer1[spelling] in names and "lm_head" in names, names
            assert "model.layers.0.mlp.experts.3.up_proj" in names, names
            assert "model.layers.0.mlp.gate" in names and "model.layers.1.mlp.gate" not in names
            if spelling == "modelopt" or (fmt, spelling) == ("nvfp4", "miles"):
                hf = json.load(open(d + "/hf_quant_config.json"))["quantization"]
                assert hf["exclude_modules"] == names and hf["group_size"] == 16
        run("quantize", FINAL, f("e"), "--format", "mxfp8", "--experts-only", "--bf16-first-n", "1")
        report = inspect(f("e"))
        assert report["odd"] == [] and layers_of(report, "attention", "bf16") == [[0, 1, 2]]
        assert layers_of(report, "experts", "mxfp8") == [[1, 2]]
        run("quantize", FINAL, f("h"), "--format", "fp8-channel", "--lm-head", "--exclude", "re:.*experts")
        report = inspect(f("h"))
        assert report["odd"] == [] and layers_of(report, "head", "fp8-channel") == [[]], report
        assert layers_of(report, "experts", "bf16") == [[0, 1, 2]]
        assert "lm_head" not in config(f("h"))["ignore"]
        assert "re:^model\\.layers\\.0\\.mlp\\.experts\\." in config(f("h"))["ignore"]


def test_threads_and_shards_do_not_show():
    if np is None:
        return
    with Folder() as f:
        for name, *flags in (("a", "--threads", "1"), ("b", "--threads", "7")):
            run("quantize", FINAL, f(name), "--format", "nvfp4", "--max-shard-gb", "0.001", *flags)
        run("quantize", FINAL, f("one"), "--format", "nvfp4", "--threads", "3")
        files = sorted(os.listdir(f("a")))
        assert files == sorted(os.listdir(f("b"))) and "model.safetensors.index.json" in files
        assert filecmp.cmpfiles(f("a"), f("b"), files, False)[0] == files
        index = json.load(open(f("a/model.safetensors.index.json")))
        a, one = oracle.read(f("a")), oracle.read(f("one"))
        assert a.keys() == one.keys() == index["weight_map"].keys()
        assert all(a[n][1].tobytes() == one[n][1].tobytes() for n in a)
        assert index["metadata"]["total_size"] == sum(x.nbytes for _, x in a.values())
        shards = [n for n in files if n.endswith(".safetensors")]
        assert len(shards) > 3 and set(index["weight_map"].values()) == set(shards)
        assert "model.safetensors.index.json" not in os.listdir(f("one"))


def poisoned(path, name, bits):
    """A copy of the model with one BF16 value replaced."""
    shutil.copytree(FINAL, path)
    file = [n for n in os.listdir(path) if n.endswith(".safetensors")][0]
    with open(os.path.join(path, file), "r+b") as w:
        n = struct.unpack("<Q", w.read(8))[0]
        offset = json.loads(w.read(n))[name]["data_offsets"][0]
        w.seek(8 + n + offset + 2 * 700)
        w.write(struct.pack("<H", bits))


def test_errors_leave_nothing():
    with Folder() as f:
        os.mkdir(f("there"))
        poisoned(f("nan"), "model.layers.1.mlp.experts.4.up_proj.weight", 0x7FC0)
        poisoned(f("huge"), "model.layers.2.self_attn.k_proj.weight", 0x7F7F)
        shutil.copytree(FINAL, f("tied"))
        c = json.load(open(f("tied/config.json")))
        json.dump(dict(c, tie_word_embeddings=True), open(f("tied/config.json"), "w"))
        before = sorted(os.listdir(f.dir))
        mxfp8 = ("--format", "mxfp8")
        for args, says in (
                ((FINAL, f("there"), *mxfp8), ("there", "exists")),
                ((FINAL, f("no/x"), *mxfp8), ("no/x", "No such file")),
                ((f("there"), f("x"), *mxfp8), ("config.json", "No such file")),
                ((f("absent"), f("x"), *mxfp8), ("absent", "no such folder")),
                ((FINAL, f("x"), "--format", "mxfp5"), ("mxfp5", "nvfp4")),
                ((FINAL, f("x"), "--format", "nvfp4", "--spelling", "hf"), ("hf has no nvfp4", "modelopt")),
                ((FINAL, f("x"), *mxfp8, "--rule", "amax"), ("amax", "round-up")),
                ((FINAL, f("x"), *mxfp8, "--exclude", "layers.7"), ("layers.7", "--exclude")),
                ((FINAL, f("x"), *mxfp8, "--bf16-last-n", "3"), ("nothing is left",)),
                ((f("tied"), f("x"), *mxfp8, "--lm-head"), ("--lm-head", "tie_word_embeddings")),
                ((f("nan"), f("x"), *mxfp8), ("model.layers.1.mlp.experts.4.up_proj", "row 2", "not finite")),
                ((f("nan"), f("x"), "--format", "nvfp4"), ("model.layers.1.mlp.experts.4.up_proj", "not finite")),
                ((f("huge"), f("x"), *mxfp8), ("model.layers.2.self_attn.k_proj", "mxfp8"))):
            error = run("quantize", *args, rc=1)
            for word in says:
                assert word in error, (args, error)
            assert sorted(os.listdir(f.dir)) == before, (args, os.listdir(f.dir))
        for args in ((FINAL,), (FINAL, f("x"), "--formt", "mxfp8"), (FINAL, f("x"), *mxfp8, "--threads", "0")):
            run("quantize", *args, rc=2)

        def small_files():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
        error = run("quantize", FINAL, f("x"), *mxfp8, rc=1, preexec_fn=small_files, restore_signals=False)
        assert "model.safetensors" in error and "room for" in error, error
        assert sorted(os.listdir(f.dir)) == before


def zeros(path, vocab=2048, hidden=1024, inner=1024, experts=64, layers=4):
    """A model of zeros that takes no disk space: 1.6 GB as it is called here."""
    c = json.load(open(os.path.join(FINAL, "config.json")))
    c.update(vocab_size=vocab, hidden_size=hidden, moe_intermediate_size=inner, num_experts=experts,
             num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    shapes = {"model.embed_tokens": [vocab, hidden], "lm_head": [vocab, hidden], "model.norm": [hidden]}
    for i in range(layers):
        m = f"model.layers.{i}."
        shapes.update({m + "input_layernorm": [hidden], m + "post_attention_layernorm": [hidden],
                       m + "self_attn.q_proj": [1024, hidden], m + "self_attn.k_proj": [256, hidden],
                       m + "self_attn.v_proj": [256, hidden], m + "self_attn.o_proj": [hidden, 1024],
                       m + "self_attn.q_norm": [128], m + "self_attn.k_norm": [128],
                       m + "mlp.gate": [experts, hidden]})
        for x in range(experts):
            shapes.update({f"{m}mlp.experts.{x}.gate_proj": [inner, hidden],
                           f"{m}mlp.experts.{x}.up_proj": [inner, hidden],
                           f"{m}mlp.experts.{x}.down_proj": [hidden, inner]})
    header, at = {}, 0
    for name, shape in shapes.items():
        n = 2 * int(np.prod(shape))
        header[name + ".weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + n]}
        at += n
    os.mkdir(path)
    json.dump(c, open(os.path.join(path, "config.json"), "w"))
    with open(os.path.join(path, "model.safetensors"), "wb") as w:
        text = json.dumps(header).encode()
        w.write(struct.pack("<Q", len(text)) + text)
        w.truncate(8 + len(text) + at)
    return at


def test_memory_and_interruption():
    """Much more source than memory used; a signal in the middle leaves nothing."""
    if np is None:
        return
    with Folder() as f:
        size = zeros(f("z"), **({"layers": 1} if SLOW else {}))
        script = ("import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
                  "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
        r = subprocess.run([sys.executable, "-c", script, MOULT, "quantize", f("z"), f("q"), "--format", "nvfp4"],
                           capture_output=True, text=True, timeout=900)
        assert r.returncode == 0, r.stderr
        peak = int(r.stdout.split()[-1]) << 10
        print(f"        {size / 1e9:.1f} GB of source, peak memory {peak / 1e6:.0f} MB")
        if not SLOW:
            assert peak < 150e6, peak
        report = inspect(f("q"))
        assert report["odd"] == [] and len(layers_of(report, "experts", "nvfp4")[0]) == (1 if SLOW else 4)
        shutil.rmtree(f("q"))
        p = subprocess.Popen([MOULT, "quantize", f("z"), f("q"), "--format", "nvfp4"], stderr=subprocess.PIPE, text=True)
        while not any(".partial-" in n for n in os.listdir(f.dir)):
            assert p.poll() is None, "ended before it could be interrupted"
            time.sleep(0.002)
        p.send_signal(signal.SIGTERM)
        error = p.communicate(timeout=60)[1]
        assert p.returncode == 1 and "interrupted" in error, (p.returncode, error)
        assert os.listdir(f.dir) == ["z"], os.listdir(f.dir)


def edit_header(path, change):
    """Rewrites a folder's one weight file with another header over the same data."""
    file = os.path.join(path, "model.safetensors")
    with open(file, "rb") as r:
        header = json.loads(r.read(struct.unpack("<Q", r.read(8))[0]))
        data = r.read()
    change(header)
    text = json.dumps(header).encode()
    with open(file, "wb") as w:
        w.write(struct.pack("<Q", len(text)) + text + data)


def test_inspect_names_what_is_odd():
    if np is None:
        return
    k = "model.layers.0.self_attn.k_proj"

    def rename(old, new):
        def change(h):
            h[new] = h.pop(old)
        return change

    def edit_config(path, change):
        c = json.load(open(path + "/config.json"))
        change(c)
        json.dump(c, open(path + "/config.json", "w"))

    cases = [
        ("extra", lambda d: edit_header(d, rename("model.norm.weight", "model.nrom.weight")),
         ("model.norm.weight", "model.nrom.weight")),
        ("scale", lambda d: edit_header(d, rename(k + ".weight_scale_inv", "x.y")), (k, "x.y", "missing")),
        ("none", lambda d: edit_config(d, lambda c: c.pop("quantization_config")), ("no config says so",)),
        ("other", lambda d: edit_config(d, lambda c: c["quantization_config"].update(
            quant_method="fp8", weight_block_size=[128, 128])), (k, "fp8", "mxfp8")),
        ("nothing", lambda d: edit_config(d, lambda c: c["quantization_config"]["modules_to_not_convert"].append(
            "model.layers.9.")), ("model.layers.9.", "no module")),
        ("excluded", lambda d: edit_config(d, lambda c: c["quantization_config"]["modules_to_not_convert"].append(
            k)), (k, "excludes it")),
        ("method", lambda d: edit_config(d, lambda c: c["quantization_config"].update(quant_method="gptq")),
         ("gptq", "not implemented")),
    ]
    with Folder() as f:
        run("quantize", FINAL, f("a"), "--format", "mxfp8")
        for name, change, says in cases:
            shutil.copytree(f("a"), f(name))
            change(f(name))
            odd = " | ".join(inspect(f(name), rc=1)["odd"])
            assert all(word in odd for word in says), (name, odd)
        # BF16 where the config does not say so, and a pair of which one half is quantized
        run("quantize", FINAL, f("b"), "--format", "mxfp8", "--exclude", "*experts.3.up_proj")
        odd = " | ".join(inspect(f("b"), rc=1)["odd"])
        assert "experts.3.up_proj" in odd and "fuses" in odd, odd
        edit_config(f("b"), lambda c: c["quantization_config"].update(modules_to_not_convert=["lm_head"]))
        odd = " | ".join(inspect(f("b"), rc=1)["odd"])
        assert "3 weights are BF16 though the config does not exclude them" in odd, odd
        run("inspect", f("absent"), rc=1)
        text = run("inspect", f("a"))
        assert "mxfp8" in text and "0-2" in text and "odd" not in text


def test_quantized_while_loading_is_the_same():
    """`serve --quantization F` of the BF16 model and `serve` of what quantize wrote: the same logprobs, bit for bit."""
    prompts = ["Question: Tom has 3 apples and buys 5 more. How many?\nAnswer:", "What is 12 + 30?", "a"]
    for fmt in ("nvfp4",) if SLOW else ("nvfp4", "fp8-block", "fp8-tensor", "fp8-channel", "mxfp8", "mxfp4"):
        with Folder() as f:
            run("quantize", FINAL, f("q"), "--format", fmt)
            answers = []
            for args in ((f("q"),), (FINAL, "--quantization", fmt)):
                with Server(*args) as s:
                    answers.append([s.generate(p, 12, logprob_start_len=0)["meta_info"] for p in prompts])
            for a, b in zip(*answers):
                assert a["input_token_logprobs"] == b["input_token_logprobs"], fmt
                assert a["output_token_logprobs"] == b["output_token_logprobs"], fmt


def test_accuracy_of_what_was_written():
    """Zero-shot on the model's own problems, in each format."""
    from test_load import bench
    n = 24 if SLOW else 80
    forms = (("nvfp4", ()), ("nvfp4", ("--spelling", "miles")), ("mxfp4", ()), ("mxfp8", ("--bf16-last-n", "1")),
                       ("fp8-block", ("--spelling", "compressed-tensors")), ("fp8-tensor", ("--spelling", "modelopt")))
    for fmt, flags in forms[:2] if SLOW else forms:
        with Folder() as f:
            run("quantize", FINAL, f("q"), "--format", fmt, *flags)
            with Server(f("q")) as s:
                got = bench(s, "--chat", n=n)
            print(f"        {fmt} {' '.join(flags)}: {got:.3f}")
            assert got >= (0.96 if fmt == "mxfp4" else 0.99), (fmt, flags, got)
