/* absent.c - in a binary built without CUDA no device opens, so none of this is reached. */
#include "model/cuda/cuda.h"
#include "model/moe_api.h"

static err_t absent(struct err *e)
{
    return err_set(e, ERR_UNSUPPORTED,
                   "this binary was built without CUDA (make CUDA=1 needs nvcc)");
}

err_t cuda_model_new(struct model **out, const struct config *c, struct store *s, struct device *d,
                     const struct cuda_options *o, struct err *e)
{
    (void)out, (void)c, (void)s, (void)d, (void)o;
    return absent(e);
}

err_t cuda_model_check(const struct config *c, const struct slot_spec *specs, kv_type_t kv,
                       struct err *e)
{
    (void)c, (void)specs, (void)kv;
    return absent(e);
}

err_t cuda_model_needs(struct cuda_needs *out, const struct device *d, const struct config *c,
                       const struct cuda_options *o, struct err *e)
{
    (void)out, (void)d, (void)c, (void)o;
    return absent(e);
}

err_t gpu_create(struct moult_moe *m, const moult_moe_config *c, struct err *e)
{
    (void)m, (void)c;
    return absent(e);
}

err_t gpu_work_bytes(size_t *out, const struct moult_moe *m, struct err *e)
{
    (void)out, (void)m;
    return absent(e);
}

void gpu_destroy(struct moult_moe *m)
{
    (void)m;
}

err_t gpu_set_weights(struct moult_moe *m, const moult_moe_weights *w, struct err *e)
{
    (void)m, (void)w;
    return absent(e);
}

err_t gpu_run(struct moult_moe *m, const moult_moe_call *c, struct err *e)
{
    (void)m, (void)c;
    return absent(e);
}

static int32_t no_gpu(moult_error *err)
{
    struct err e = {0};
    return api_return(err, absent(&e), &e);
}

int32_t moult_gpu_resident_bytes(size_t *out, int32_t format, int64_t rows, int64_t cols,
                                 moult_error *err)
{
    (void)out, (void)format, (void)rows, (void)cols;
    return no_gpu(err);
}

int32_t moult_gpu_pack(moult_moe *m, void *resident, const moult_matrices *from, int64_t rows,
                       int64_t cols, void *stream, moult_error *err)
{
    (void)m, (void)resident, (void)from, (void)rows, (void)cols, (void)stream;
    return no_gpu(err);
}

int32_t moult_gpu_unpack(moult_moe *m, const moult_matrix_out *out, int32_t format, int64_t rows,
                         int64_t cols, const void *resident, void *stream, moult_error *err)
{
    (void)m, (void)out, (void)format, (void)rows, (void)cols, (void)resident, (void)stream;
    return no_gpu(err);
}

int32_t moult_gpu_resident(void **out, const moult_moe *m, int32_t expert, int32_t matrix,
                           moult_error *err)
{
    (void)out, (void)m, (void)expert, (void)matrix;
    return no_gpu(err);
}
