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
