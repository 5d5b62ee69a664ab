// A network's layers as plain loops on a CPU, one output after another: what a plan for a GPU begins with.
// Images are [image][channel][row][column], filters [filter][channel][row][column].
extern "C" {

void loops_conv2d(const float* x, const float* w, float* y, int images, int channels, int height, int width, int filters,
                  int size_h, int size_w, int stride, int padding, int out_height, int out_width) {
    for (int n = 0; n < images; ++n)
        for (int k = 0; k < filters; ++k)
            for (int oh = 0; oh < out_height; ++oh)
                for (int ow = 0; ow < out_width; ++ow) {
                    float sum = 0.f;
                    for (int c = 0; c < channels; ++c)
                        for (int r = 0; r < size_h; ++r)
                            for (int s = 0; s < size_w; ++s) {
                                const int h = oh * stride - padding + r, column = ow * stride - padding + s;
                                if (h >= 0 && h < height && column >= 0 && column < width)
                                    sum += x[((n * channels + c) * height + h) * width + column] *
                                           w[((k * channels + c) * size_h + r) * size_w + s];
                            }
                    y[((n * filters + k) * out_height + oh) * out_width + ow] = sum;
                }
}

void loops_batch_norm(const float* x, const float* scale, const float* shift, float* y, int images, int channels,
                      int pixels) {
    for (int n = 0; n < images; ++n)
        for (int c = 0; c < channels; ++c)
            for (int p = 0; p < pixels; ++p) {
                const int at = (n * channels + c) * pixels + p;
                y[at] = x[at] * scale[c] + shift[c];
            }
}

void loops_relu(const float* x, float* y, int count) {
    for (int i = 0; i < count; ++i) y[i] = x[i] > 0.f ? x[i] : 0.f;
}

void loops_add(const float* a, const float* b, float* y, int count) {
    for (int i = 0; i < count; ++i) y[i] = a[i] + b[i];
}

void loops_max_pool2d(const float* x, float* y, int planes, int height, int width, int size, int stride, int padding,
                      int out_height, int out_width) {
    for (int p = 0; p < planes; ++p)
        for (int oh = 0; oh < out_height; ++oh)
            for (int ow = 0; ow < out_width; ++ow) {
                float largest = -__builtin_inff();
                for (int r = 0; r < size; ++r)
                    for (int s = 0; s < size; ++s) {
                        const int h = oh * stride - padding + r, column = ow * stride - padding + s;
                        if (h >= 0 && h < height && column >= 0 && column < width) {
                            const float value = x[(p * height + h) * width + column];
                            if (value > largest) largest = value;
                        }
                    }
                y[(p * out_height + oh) * out_width + ow] = largest;
            }
}

void loops_mean(const float* x, float* y, int planes, int pixels) {
    for (int p = 0; p < planes; ++p) {
        float sum = 0.f;
        for (int i = 0; i < pixels; ++i) sum += x[p * pixels + i];
        y[p] = sum / pixels;
    }
}

void loops_linear(const float* x, const float* w, const float* bias, float* y, int rows, int inputs, int outputs) {
    for (int n = 0; n < rows; ++n)
        for (int k = 0; k < outputs; ++k) {
            float sum = bias[k];
            for (int i = 0; i < inputs; ++i) sum += x[n * inputs + i] * w[k * inputs + i];
            y[n * outputs + k] = sum;
        }
}
}
