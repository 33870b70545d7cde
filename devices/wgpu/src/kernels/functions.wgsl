
fn sigmoid(x: f32) -> f32 {
    return 1.0 / (1.0 + exp(-x));
}

// The built-in function may overflow.
fn safe_tanh(x: f32) -> f32 {
    return tanh(clamp(x, -15.0, 15.0));
}

// `exp(x) - 1`, also near 0.
fn exp_m1(x: f32) -> f32 {
    if abs(x) < 0.3 {
        return x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0 + x * (1.0 / 720.0 + x / 5040.0))))));
    }
    return exp(x) - 1.0;
}

// Abramowitz and Stegun 7.1.26, to 1.5e-7.
fn erf(x: f32) -> f32 {
    let t = 1.0 / (1.0 + 0.3275911 * abs(x));
    let sum = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))));
    return sign(x) * (1.0 - sum * exp(-x * x));
}

fn gelu(x: f32) -> f32 {
    return 0.5 * x * (1.0 + safe_tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x)));
}

fn gelu_erf(x: f32) -> f32 {
    return 0.5 * x * (1.0 + erf(x * 0.7071067812));
}

fn function(x: f32, z: f32, i: vec4<u32>, n: u32) -> f32 {
    let p = parameters.floats[0];
    let k = parameters.ints[0];
    return {{expression}};
}

