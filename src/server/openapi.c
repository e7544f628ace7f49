#include "server/openapi.h"
#include "server/internal.h"
#include <string.h>

/* Fields: "name type[|type]...[!]", separated by spaces and commas; ! means required. */
struct doc {
    const char *path, *about, *fields;
};

#define SAMPLED                                                                                   \
    "model string, max_tokens integer, temperature number, top_p number, top_k integer, min_p "   \
    "number, n integer, "                                                                         \
    "stop string|array, stop_token_ids array, stream boolean, stream_options object, seed "       \
    "integer, "                                                                                   \
    "frequency_penalty number, presence_penalty number, repetition_penalty number, logit_bias "   \
    "object, "                                                                                    \
    "ignore_eos boolean, min_tokens integer, skip_special_tokens boolean, no_stop_trim boolean, " \
    "rid string, "                                                                                \
    "priority integer, extra_key string, return_routed_experts boolean, response_format object"
#define UPDATE                                                                                   \
    "weight_version string, flush_cache boolean, abort_all_requests boolean, in_flight string, " \
    "drain_timeout number, "                                                                     \
    "refuse_older_version boolean"
#define READ    "load_format string, manifest string, check_finite boolean, "
#define NOTHING ""

static const struct doc docs[] = {
    {"/", "A page for people, a JSON string for programs", NULL},
    {"/ping", "Is the process there?", NULL},
    {"/health", "Does it serve?", NULL},
    {"/health_generate", "Does it serve?", NULL},
    {"/openapi.json", "This description", NULL},
    {"/model_info", "Model, weight version", NULL},
    {"/get_model_info", "As /model_info", NULL},
    {"/server_info", "Settings and state", NULL},
    {"/get_server_info", "As /server_info", NULL},
    {"/weight_version", "Label of the weights", NULL},
    {"/get_weight_version", "As /weight_version", NULL},
    {"/v1/loads", "Requests, tokens, KV", NULL},
    {"/get_load", "As /v1/loads, the older form", NULL},
    {"/metrics", "Numbers for Prometheus", NULL},
    {"/expert_load", "Tokens of each expert of each layer", NULL},
    {"/v1/models", "The model served", NULL},
    {"/v1/models/", "One model by its name", NULL},
    {"/generate", "Generate from text or ids",
     "text string|array, input_ids array, sampling_params object|array, rid string|array, stream "
     "boolean, "
     "return_logprob boolean|array, logprob_start_len integer|array, top_logprobs_num "
     "integer|array, "
     "token_ids_logprob array, return_text_in_logprobs boolean, return_prompt_token_ids boolean, "
     "return_routed_experts boolean|array, priority integer, extra_key string|array"},
    {"/v1/completions", "Complete prompts",
     "prompt string|array!, echo boolean, logprobs integer, " SAMPLED},
    {"/v1/chat/completions", "Answer in a conversation",
     "messages array!, logprobs boolean, top_logprobs integer, tools array, tool_choice "
     "string|object, input_ids array, "
     "chat_template_kwargs object, separate_reasoning boolean, max_completion_tokens integer, "
     "return_meta_info boolean, " SAMPLED},
    {"/tokenize", "Text to ids", "prompt string|array, messages array, add_special_tokens boolean"},
    {"/v1/tokenize", "As /tokenize",
     "prompt string|array, messages array, add_special_tokens boolean"},
    {"/detokenize", "Ids to text", "tokens array!, skip_special_tokens boolean"},
    {"/v1/detokenize", "As /detokenize", "tokens array!, skip_special_tokens boolean"},
    {"/flush_cache", "Empty the prefix cache", NOTHING},
    {"/abort_request", "End requests by the beginning of their id, or all",
     "rid string, abort_all boolean"},
    {"/pause_generation", "Hold all requests", "mode string"},
    {"/continue_generation", "Go on after a pause", NOTHING},
    {"/update_weights_from_disk", "Replace the weights by those of a folder",
     "model_path string!, " READ UPDATE},
    {"/stage_weights_from_disk", "Read a folder's weights beside serving",
     "model_path string!, " READ UPDATE},
    {"/commit_weights", "Put staged weights in place", "model_path string, " UPDATE},
    {"/discard_staged_weights", "Forget staged weights", NOTHING},
    {"/weight_update_status", "The open update and the last ones", NULL},
    {"/update_weight_version", "Give the weights another label",
     "new_version string!, abort_all_requests boolean"},
    {"/pull_weights", "Bring a folder to a version that a trainer has written",
     "local_checkpoint_dir string!, source_dir string!, target_version integer!"},
    {"/update_weights_from_tensor", "Replace named tensors", NULL},
    {"/begin_weight_update", "Open a session of tensor updates",
     "selector string, restart boolean"},
    {"/end_weight_update", "Commit the session", UPDATE},
    {"/post_process_weights", "Nothing: answered for trainers that ask", NOTHING},
    {"/get_weights_by_name", "Values or bytes of a tensor", "name string!, truncate_size integer"},
    {"/weights_checker", "Checksums of the weights", "action string, allow_quant_error boolean"},
    {"/release_memory_occupation", "Give memory back while idle", "tags array"},
    {"/resume_memory_occupation", "Take it again", "tags array"},
    {"/init_weights_update_group", "Refused: needs several GPUs", NOTHING},
    {"/destroy_weights_update_group", "Refused: needs several GPUs", NOTHING},
    {"/update_weights_from_distributed", "Refused: needs several GPUs", NOTHING},
    {"/update_weights_from_ipc", "Refused: needs several GPUs", NOTHING},
    {"/start_profile", "Trace the engine's steps", "output_dir string, num_steps integer"},
    {"/stop_profile", "Write the trace", NOTHING},
};

static const struct doc *find(const char *path)
{
    for (size_t i = 0; i < sizeof docs / sizeof docs[0]; i++)
        if (!strcmp(docs[i].path, path)) return &docs[i];
    return NULL;
}

/* One field's schema from "string|array!"; null stands for "not given" everywhere. */
static void put_types(struct buf *b, const char *types, size_t n)
{
    buf_puts(b, "{\"type\":[");
    for (const char *at = types, *end = types + n; at < end;) {
        size_t k = strcspn(at, "|!, ");
        if (at + k > end) k = (size_t)(end - at);
        put_str(b, at, k);
        buf_putc(b, ',');
        at += k + (at[k] == '|');
        if (at < end && *at == '!') break;
    }
    buf_puts(b, "\"null\"]}");
}

static void put_fields(struct buf *b, const char *fields)
{
    struct buf must = {0};
    bool first = true;
    buf_puts(b, "{\"type\":\"object\",\"properties\":{");
    for (const char *at = fields; *at; first = false) {
        size_t name = strcspn(at, " "), types = strcspn(at + name + 1, ", ");
        const char *type = at + name + 1;
        if (!first) buf_putc(b, ',');
        put_str(b, at, name);
        buf_putc(b, ':');
        put_types(b, type, types);
        if (type[types - 1] == '!') {
            if (must.len) buf_putc(&must, ',');
            put_str(&must, at, name);
        }
        at = type + types;
        at += strspn(at, ", ");
    }
    buf_puts(b, "}");
    if (must.len) buf_printf(b, ",\"required\":[%s]", must.data);
    buf_puts(b, "}");
    buf_release(&must);
}

static void put_operation(struct buf *b, const struct route *r, const struct doc *d, bool body)
{
    bool admin = r->who == FOR_CONTROL;
    buf_puts(b, "{\"summary\":");
    put_str(b, d ? d->about : "", d ? strlen(d->about) : 0);
    buf_printf(b, ",\"tags\":[\"%s\"]",
               admin                    ? "control"
               : r->flags & ROUTE_LATER ? "generate"
                                        : "information");
    if (r->path[strlen(r->path) - 1] == '/' && r->path[1])
        buf_puts(b, ",\"parameters\":[{\"name\":\"id\",\"in\":\"path\",\"required\":true,"
                    "\"schema\":{\"type\":\"string\"}}]");
    if (body && d && d->fields) {
        buf_printf(
            b, ",\"requestBody\":{\"required\":%s,\"content\":{\"application/json\":{\"schema\":",
            strchr(d->fields, '!') ? "true" : "false");
        put_fields(b, d->fields);
        buf_puts(b, "}}}");
    }
    buf_puts(b, ",\"responses\":{\"200\":{\"description\":\"done\"},\"4XX\":{\"description\":"
                "\"refused, with the reason\"},"
                "\"503\":{\"description\":\"not now\"}}}");
}

void openapi_put(struct buf *out)
{
    const struct route *r;
    buf_puts(out, "{\"openapi\":\"3.1.0\",\"info\":{\"title\":\"Moult\",\"version\":\"1\"},"
                  "\"components\":{\"securitySchemes\":{"
                  "\"key\":{\"type\":\"http\",\"scheme\":\"bearer\"}}},\"security\":[{},{\"key\":[]"
                  "}],\"paths\":{");
    for (size_t i = 0; (r = route_at(i)); i++) {
        const struct doc *d = find(r->path);
        static const struct {
            int method;
            const char *name;
        } methods[] = {{M_GET, "get"}, {M_POST, "post"}, {M_PUT, "put"}};
        bool first = true, many = r->path[strlen(r->path) - 1] == '/' && r->path[1];
        buf_printf(out, "%s\"%s%s\":{", i ? "," : "", r->path, many ? "{id}" : "");
        for (size_t m = 0; m < sizeof methods / sizeof methods[0]; m++) {
            if (!(r->methods & methods[m].method)) continue;
            buf_printf(out, "%s\"%s\":", first ? "" : ",", methods[m].name);
            put_operation(out, r, d, methods[m].method != M_GET);
            first = false;
        }
        buf_putc(out, '}');
    }
    buf_puts(out, "}}");
}
