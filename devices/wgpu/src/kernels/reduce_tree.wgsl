
// Sums and maxima over a workgroup, without subgroups. All invocations must call them.

struct Place {
    local: u32,
}

var<workgroup> scratch: array<f32, {{group_size}}>;

// What of `x` is summed before memory is needed: nothing.
fn partial_sum(x: f32) -> f32 {
    return x;
}

// Which partial sum is whose, how many there are, and who has one.
fn partial_slot(place: Place) -> u32 {
    return place.local;
}

fn partial_slots(place: Place) -> u32 {
    return {{group_size}}u;
}

fn has_partial(place: Place) -> bool {
    return true;
}

fn sum_all(x: f32, place: Place) -> f32 {
    workgroupBarrier();
    scratch[place.local] = x;
    for (var half = {{group_size}}u / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if place.local < half {
            scratch[place.local] += scratch[place.local + half];
        }
    }
    workgroupBarrier();
    return scratch[0];
}

fn max_all(x: f32, place: Place) -> f32 {
    workgroupBarrier();
    scratch[place.local] = x;
    for (var half = {{group_size}}u / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if place.local < half {
            scratch[place.local] = max(scratch[place.local], scratch[place.local + half]);
        }
    }
    workgroupBarrier();
    return scratch[0];
}
