"""Black-box tests of the server over loopback.  python3 test/server/run.py [name ... | @threads]"""
import importlib
import os
import sys
import time
import traceback

sys.path.insert(0, os.path.dirname(__file__))
os.makedirs("build/log", exist_ok=True)
# Where threads meet: what runs under TSan; the rest runs under ASan only.
THREADS = ("test_ready_and_info", "test_prefix_cache_and_batch_do_not_show", "test_client_leaves",
           "test_abort_keeps_a_prefix", "test_json_attacks", "test_update_equals_fresh_start", "test_update_under_load",
           "test_abort_all_updates_at_once", "test_client", "test_sigterm_drains", "test_sigterm_streams_get_their_end",
           "test_full_queue", "test_every_combination", "test_client_leaves_anywhere", "test_limit_of_descriptors",
           "test_threads_and_shards_do_not_show", "test_stage_and_commit", "test_soak", "test_sessions")
names = THREADS if sys.argv[1:] == ["@threads"] else sys.argv[1:]
passed, failures = 0, []
MODULES = (
    "test_generate",
    "test_errors",
    "test_update",
    "test_openai",
    "test_chat",
    "test_grammar",
    "test_clients",
    "test_lm_eval",
    "test_chain",
    "test_numbers",
    "test_router",
    "test_load",
    "test_connections",
    "test_access",
    "test_quantize",
    "test_routed",
    "test_native",
    "test_control",
    "test_staging",
    "test_operators",
    "test_page",
    "test_openapi",
    "test_trainers",
    "test_tensor",
    "test_gpu",
)
for module in MODULES:
    m = importlib.import_module(module)
    for name, f in list(vars(m).items()):
        if not name.startswith("test_") or not callable(f) or (names and name not in names):
            continue
        t = time.time()
        try:
            f()
            passed += 1
            print(f"ok      {module}.{name} ({time.time() - t:.1f} s)", flush=True)
        except Exception:
            failures.append(f"FAILED  {module}.{name} ({time.time() - t:.1f} s)\n{traceback.format_exc()}")
            print(failures[-1], flush=True)
# Again, last: a log of which only the end is kept names them too.
print("".join(failures) + f"{passed} passed, {len(failures)} failed")
sys.exit(len(failures) != 0)
