#include "model/rope.h"
#include <math.h>

void rope_angles(float *cos_out, float *sin_out, const struct config *c, int32_t positions)
{
    int half = c->head_dim / 2;
    for (int i = 0; i < half; i++) {
        double exponent = (double)((float)(2 * i) / (float)c->head_dim);
        float inv = 1.0f / (float)pow((double)c->rope_theta, exponent);
        for (int32_t p = 0; p < positions; p++) {
            float angle = (float)p * inv;
            cos_out[(size_t)p * (size_t)half + (size_t)i] = (float)cos((double)angle);
            sin_out[(size_t)p * (size_t)half + (size_t)i] = (float)sin((double)angle);
        }
    }
}
