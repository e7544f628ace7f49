/* routes.c - every path that is served, and by what. */
#include "server/internal.h"
#include <stdio.h>
#include "server/openapi.h"
#include "server/page.h"
#include <string.h>

static void api_root(struct xchg *x, const json_t *b)
{
    const char *accept = MHD_lookup_connection_value(x->c, MHD_HEADER_KIND, "Accept");
    (void)b;
    if (accept && strstr(accept, "text/html")) {
        x->type = "text/html; charset=utf-8";
        buf_put(&x->out, page_html, (size_t)(page_html_end - page_html));
        return;
    }
    reply_text(x, 200, "application/json", "\"Moult is running\"");
}

static void api_ping(struct xchg *x, const json_t *b)
{
    (void)b;
    x->type = NULL;
}

/* Routes that SGLang has and that make no sense here: 400 with the reason. */
#define NO_EMBED   "only generation is served"
#define NO_LORA    "adapters are not served"
#define NO_SESSION "there are no sessions; the prefix cache finds what prompts share"
#define NO_TIERS   "the prefix cache lives in one memory"
#define NO_DIST    "send return_routed_experts with a request to see its routing"
#define NO_PARSE   "/v1/chat/completions does it with --tool-call-parser and --reasoning-parser"
#define NO_PROXY   "use /v1/chat/completions, /v1/completions or /generate"
static const struct {
    const char *path, *why; /* one that ends with / stands for all longer ones */
} refused[] = {
    {"/v1/embeddings", NO_EMBED},
    {"/v1/classify", NO_EMBED},
    {"/classify", NO_EMBED},
    {"/v1/score", NO_EMBED},
    {"/v1/rerank", NO_EMBED},
    {"/encode", NO_EMBED},
    {"/v1/responses", NO_PROXY},
    {"/v1/responses/", NO_PROXY},
    {"/v1/messages", NO_PROXY},
    {"/v1/messages/", NO_PROXY},
    {"/v1/audio/", "only text is served"},
    {"/v1/realtime", "only text is served"},
    {"/api/", NO_PROXY},
    {"/invocations", NO_PROXY},
    {"/vertex_generate", NO_PROXY},
    {"/generate_from_file", "input_embeds are not taken; " NO_PROXY},
    {"/open_session", NO_SESSION},
    {"/close_session", NO_SESSION},
    {"/load_lora_adapter", NO_LORA},
    {"/load_lora_adapter_from_tensors", NO_LORA},
    {"/load_lora_adapter_from_distributed", NO_LORA},
    {"/unload_lora_adapter", NO_LORA},
    {"/start_expert_distribution_record", NO_DIST},
    {"/stop_expert_distribution_record", NO_DIST},
    {"/dump_expert_distribution_record", NO_DIST},
    {"/hicache/", NO_TIERS},
    {"/freeze_gc", "there is no garbage collector to freeze"},
    {"/slow_down", "steps are never slowed down"},
    {"/configure_logging", "start the server with --log-level"},
    {"/parse_function_call", NO_PARSE},
    {"/separate_reasoning", NO_PARSE},
    {"/parallelism_config", "the model runs in one process; /server_info tells the sizes"},
    {"/set_internal_state", "none of the settings it takes exist here"},
};

static bool path_is(const char *row, const char *path)
{
    size_t n = strlen(row);
    bool prefix = n > 1 && row[n - 1] == '/';
    return prefix ? !strncmp(row, path, n) && path[n] : !strcmp(row, path);
}

static void api_refused(struct xchg *x, const json_t *b)
{
    char text[256] = "";
    (void)b;
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
        if (path_is(refused[i].path, x->path))
            snprintf(text, sizeof text, "%s is not served here: %s", refused[i].path,
                     refused[i].why);
    reply_error(x, 400, text);
}

static void api_openapi(struct xchg *x, const json_t *b)
{
    (void)b;
    openapi_put(&x->out);
}

static const struct route refusal = {"",         M_GET | M_POST | M_PUT, FOR_USERS,
                                     RUN_WORKER, ROUTE_LOADING,          api_refused};

static const struct route routes[] = {
    {"/", M_GET, FOR_ALL, RUN_INLINE, ROUTE_LOADING, api_root},
    {"/openapi.json", M_GET, FOR_USERS, RUN_INLINE, ROUTE_LOADING, api_openapi},
    {"/ping", M_GET, FOR_USERS, RUN_INLINE, ROUTE_LOADING, api_ping},
    {"/health", M_GET, FOR_ALL, RUN_INLINE, 0, api_health},
    {"/health_generate", M_GET, FOR_ALL, RUN_INLINE, 0, api_health},
    {"/model_info", M_GET, FOR_USERS, RUN_INLINE, 0, api_model_info},
    {"/get_model_info", M_GET, FOR_USERS, RUN_INLINE, 0, api_model_info},
    {"/server_info", M_GET, FOR_USERS, RUN_INLINE, 0, api_server_info},
    {"/get_server_info", M_GET, FOR_USERS, RUN_INLINE, 0, api_server_info},
    {"/weight_version", M_GET, FOR_USERS, RUN_INLINE, 0, api_weight_version},
    {"/get_weight_version", M_GET, FOR_USERS, RUN_INLINE, 0, api_weight_version},
    {"/v1/loads", M_GET, FOR_USERS, RUN_INLINE, 0, api_loads},
    {"/metrics", M_GET, FOR_ALL, RUN_INLINE, 0, api_metrics},
    {"/expert_load", M_GET, FOR_USERS, RUN_WORKER, 0, api_expert_load},
    {"/get_load", M_GET, FOR_USERS, RUN_INLINE, 0, api_get_load},
    {"/v1/models", M_GET, FOR_USERS, RUN_INLINE, 0, api_models},
    {"/v1/models/", M_GET, FOR_USERS, RUN_INLINE, 0, api_model},
    {"/flush_cache", M_GET | M_POST, FOR_CONTROL, RUN_THREAD, 0, api_flush},
    {"/abort_request", M_POST, FOR_CONTROL, RUN_WORKER, 0, api_abort_request},
    {"/pause_generation", M_POST, FOR_CONTROL, RUN_THREAD, 0, api_pause},
    {"/continue_generation", M_POST, FOR_CONTROL, RUN_THREAD, 0, api_continue},
    {"/update_weight_version", M_POST, FOR_CONTROL, RUN_THREAD, 0, api_update_weight_version},
    {"/start_profile", M_GET | M_POST, FOR_CONTROL, RUN_THREAD, 0, api_start_profile},
    {"/stop_profile", M_GET | M_POST, FOR_CONTROL, RUN_THREAD, 0, api_stop_profile},
    {"/update_weights_from_disk", M_POST, FOR_CONTROL, RUN_THREAD, 0, api_update_from_disk},
    {"/update_weights_from_tensor", M_POST, FOR_CONTROL, RUN_THREAD, ROUTE_BYTES,
     api_update_from_tensor},
    {"/begin_weight_update", M_POST, FOR_CONTROL, RUN_WORKER, 0, api_begin_update},
    {"/end_weight_update", M_POST, FOR_CONTROL, RUN_THREAD, 0, api_end_update},
    {"/get_weights_by_name", M_GET | M_POST, FOR_CONTROL, RUN_THREAD, 0, api_get_weights},
    {"/weights_checker", M_GET | M_POST, FOR_CONTROL, RUN_THREAD, 0, api_check_weights},
    {"/release_memory_occupation", M_GET | M_POST, FOR_CONTROL, RUN_THREAD, 0, api_release_memory},
    {"/resume_memory_occupation", M_GET | M_POST, FOR_CONTROL, RUN_THREAD, 0, api_resume_memory},
    {"/post_process_weights", M_POST, FOR_CONTROL, RUN_WORKER, 0, api_post_process},
    {"/init_weights_update_group", M_POST, FOR_CONTROL, RUN_WORKER, 0, api_multi_gpu},
    {"/destroy_weights_update_group", M_POST, FOR_CONTROL, RUN_WORKER, 0, api_multi_gpu},
    {"/update_weights_from_distributed", M_POST, FOR_CONTROL, RUN_WORKER, 0, api_multi_gpu},
    {"/update_weights_from_ipc", M_POST, FOR_CONTROL, RUN_WORKER, 0, api_multi_gpu},
    {"/tokenize", M_POST, FOR_USERS, RUN_WORKER, 0, api_tokenize},
    {"/v1/tokenize", M_POST, FOR_USERS, RUN_WORKER, 0, api_tokenize},
    {"/detokenize", M_POST, FOR_USERS, RUN_WORKER, 0, api_detokenize},
    {"/v1/detokenize", M_POST, FOR_USERS, RUN_WORKER, 0, api_detokenize},
    {"/pull_weights", M_POST, FOR_CONTROL, RUN_THREAD, 0, api_pull_weights},
    {"/stage_weights_from_disk", M_POST, FOR_CONTROL, RUN_THREAD, 0, api_stage_from_disk},
    {"/commit_weights", M_POST, FOR_CONTROL, RUN_THREAD, 0, api_commit_weights},
    {"/discard_staged_weights", M_POST, FOR_CONTROL, RUN_THREAD, 0, api_discard_weights},
    {"/weight_update_status", M_GET, FOR_CONTROL, RUN_INLINE, 0, api_update_status},
    {"/generate", M_POST | M_PUT, FOR_USERS, RUN_WORKER, ROUTE_LATER | ROUTE_GENERATES,
     api_generate},
    {"/v1/completions", M_POST, FOR_USERS, RUN_WORKER, ROUTE_OPENAI | ROUTE_LATER | ROUTE_GENERATES,
     api_completions},
    {"/v1/chat/completions", M_POST, FOR_USERS, RUN_WORKER,
     ROUTE_OPENAI | ROUTE_LATER | ROUTE_GENERATES, api_chat},
};

const struct route *route_at(size_t i)
{
    return i < sizeof routes / sizeof routes[0] ? &routes[i] : NULL;
}

const struct route *route_find(const char *path)
{
    for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++)
        if (path_is(routes[i].path, path)) return &routes[i];
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
        if (path_is(refused[i].path, path)) return &refusal;
    return NULL;
}
