/* absent.c - in a binary built without CUDA no device opens, so none of this is reached. */
#include "model/cuda/cuda.h"

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

err_t cuda_model_bytes(size_t *work, size_t *kv_page, const struct config *c,
                       const struct cuda_options *o, struct err *e)
{
    (void)work, (void)kv_page, (void)c, (void)o;
    return absent(e);
}
