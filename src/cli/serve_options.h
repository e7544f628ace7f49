/* serve_options.h - the flags of `moult serve`; names are those of SGLang's launch_server. */
#ifndef CLI_SERVE_OPTIONS_H
#define CLI_SERVE_OPTIONS_H

#include "cli/load.h"
#include "cli/options.h"

struct serve_args {
    const char *model, *tokenizer_path, *host, *served_name, *weight_version, *api_key, *isa;
    const char *quantization, *device, *update_staging;
    const char *log_level, *dtype, *load_format, *kv_dtype, *moe_backend, *act_format;
    int64_t port, context_length, max_running, max_queued, max_total_tokens, chunk, page_size;
    int64_t max_body, max_weight_body, threads, retract_every, loader_threads;
    double mem_fraction, watchdog_s, drain_s, update_drain_s;
    const char *update_in_flight;
    bool ready_after_update;
    bool no_graphs, no_prefix_cache, incremental, check, skip_warmup, trust_remote_code;
    bool deterministic, metrics, memory_saver, weights_backup;
    struct numerics numerics; /* from moe_backend and act_format */
};

extern const struct opt_command serve_command;

#endif
