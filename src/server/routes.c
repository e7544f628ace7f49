/* routes.c - every path that is served, and by what. */
#include "server/internal.h"
#include <string.h>

static void api_root(struct xchg *x, const json_t *b)
{
    (void)b;
    reply_text(x, 200, "application/json", "\"Moult is running\"");
}

static void api_ping(struct xchg *x, const json_t *b)
{
    (void)b;
    x->type = NULL;
}

static const struct route routes[] = {
    {"/", M_GET, RUN_INLINE, ROUTE_LOADING, api_root},
    {"/ping", M_GET, RUN_INLINE, ROUTE_LOADING, api_ping},
    {"/health", M_GET, RUN_INLINE, 0, api_health},
    {"/health_generate", M_GET, RUN_INLINE, 0, api_health},
    {"/model_info", M_GET, RUN_INLINE, 0, api_model_info},
    {"/get_model_info", M_GET, RUN_INLINE, 0, api_model_info},
    {"/server_info", M_GET, RUN_INLINE, 0, api_server_info},
    {"/get_server_info", M_GET, RUN_INLINE, 0, api_server_info},
    {"/weight_version", M_GET, RUN_INLINE, 0, api_weight_version},
    {"/get_weight_version", M_GET, RUN_INLINE, 0, api_weight_version},
    {"/v1/loads", M_GET, RUN_INLINE, 0, api_loads},
    {"/get_load", M_GET, RUN_INLINE, 0, api_get_load},
    {"/v1/models", M_GET, RUN_INLINE, 0, api_models},
    {"/v1/models/", M_GET, RUN_INLINE, 0, api_model},
    {"/flush_cache", M_GET | M_POST, RUN_THREAD, 0, api_flush},
    {"/abort_request", M_POST, RUN_WORKER, 0, api_abort_request},
    {"/pause_generation", M_POST, RUN_THREAD, 0, api_pause},
    {"/continue_generation", M_POST, RUN_THREAD, 0, api_continue},
    {"/update_weight_version", M_POST, RUN_THREAD, 0, api_update_weight_version},
    {"/update_weights_from_disk", M_POST, RUN_THREAD, 0, api_update_from_disk},
    {"/update_weights_from_tensor", M_POST, RUN_THREAD, ROUTE_BYTES, api_update_from_tensor},
    {"/begin_weight_update", M_POST, RUN_WORKER, 0, api_begin_update},
    {"/end_weight_update", M_POST, RUN_THREAD, 0, api_end_update},
    {"/get_weights_by_name", M_GET | M_POST, RUN_THREAD, 0, api_get_weights},
    {"/weights_checker", M_GET | M_POST, RUN_THREAD, 0, api_check_weights},
    {"/release_memory_occupation", M_GET | M_POST, RUN_THREAD, 0, api_release_memory},
    {"/resume_memory_occupation", M_GET | M_POST, RUN_THREAD, 0, api_resume_memory},
    {"/post_process_weights", M_POST, RUN_WORKER, 0, api_post_process},
    {"/init_weights_update_group", M_POST, RUN_WORKER, 0, api_multi_gpu},
    {"/destroy_weights_update_group", M_POST, RUN_WORKER, 0, api_multi_gpu},
    {"/update_weights_from_distributed", M_POST, RUN_WORKER, 0, api_multi_gpu},
    {"/update_weights_from_ipc", M_POST, RUN_WORKER, 0, api_multi_gpu},
    {"/stage_weights_from_disk", M_POST, RUN_THREAD, 0, api_stage_from_disk},
    {"/commit_weights", M_POST, RUN_THREAD, 0, api_commit_weights},
    {"/discard_staged_weights", M_POST, RUN_THREAD, 0, api_discard_weights},
    {"/weight_update_status", M_GET, RUN_INLINE, 0, api_update_status},
    {"/generate", M_POST | M_PUT, RUN_WORKER, ROUTE_LATER | ROUTE_GENERATES, api_generate},
    {"/v1/completions", M_POST, RUN_WORKER, ROUTE_OPENAI | ROUTE_LATER | ROUTE_GENERATES, api_completions},
    {"/v1/chat/completions", M_POST, RUN_WORKER, ROUTE_OPENAI | ROUTE_LATER | ROUTE_GENERATES, api_chat},
};

const struct route *route_find(const char *path)
{
    for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++) {
        size_t n = strlen(routes[i].path);
        bool prefix = n > 1 && routes[i].path[n - 1] == '/';
        if (prefix ? !strncmp(routes[i].path, path, n) && path[n] : !strcmp(routes[i].path, path)) return &routes[i];
    }
    return NULL;
}
