/* serve_options.h - the flags of `moult serve`; names are those of SGLang's launch_server. */
#ifndef CLI_SERVE_OPTIONS_H
#define CLI_SERVE_OPTIONS_H

#include "cli/load.h"
#include "cli/options.h"

struct serve_args {
    const char *model, *tokenizer_path, *host, *served_name, *weight_version, *api_key, *isa;
    const char *quantization, *device, *update_staging;
    const char *tool_parser, *reasoning_parser, *sampling_defaults;
    const char *log_level, *dtype, *load_format, *kv_dtype, *moe_backend, *act_format;
    int64_t port, context_length, max_running, max_queued, max_total_tokens, chunk, page_size;
    const char *preferred;
    int64_t stream_interval;
    int64_t max_body, max_weight_body, keep_alive_s, threads, retract_every, loader_threads;
    double mem_fraction, watchdog_s, drain_s, update_drain_s;
    const char *update_in_flight;
    bool ready_after_update;
    bool no_graphs, no_overlap, no_prefix_cache, incremental, check, skip_warmup, trust_remote_code;
    bool deterministic, metrics, keep_experts, log_requests, cache_report, memory_saver,
        weights_backup;
    const char *admin_key, *cors_origin, *metrics_prefix, *log_format, *config, *record;
    struct opt_strings allowed_paths;
    double status_s;
    struct opt_strings server_info; /* KEY=VALUE */
    struct numerics numerics;       /* from moe_backend and act_format */
};

extern const struct opt_command serve_command;

#endif
