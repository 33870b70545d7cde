
// Sums and maxima over a workgroup, by subgroups of whatever size. All invocations must call them.

struct Place {
    local: u32,
    subgroup: u32,
    lane: u32,
    subgroups: u32,
}

var<workgroup> scratch: array<f32, {{group_size}}>;

// What of `x` is summed before memory is needed.
fn partial_sum(x: f32) -> f32 {
    return subgroupAdd(x);
}

// Which partial sum is whose, how many there are, and who has one.
fn partial_slot(place: Place) -> u32 {
    return place.subgroup;
}

fn partial_slots(place: Place) -> u32 {
    return place.subgroups;
}

fn has_partial(place: Place) -> bool {
    return place.lane == 0u;
}

fn sum_all(x: f32, place: Place) -> f32 {
    let partial = subgroupAdd(x);
    workgroupBarrier();
    if place.lane == 0u {
        scratch[place.subgroup] = partial;
    }
    workgroupBarrier();
    var sum = 0.0;
    for (var k = 0u; k < place.subgroups; k++) {
        sum += scratch[k];
    }
    return sum;
}

fn max_all(x: f32, place: Place) -> f32 {
    let partial = subgroupMax(x);
    workgroupBarrier();
    if place.lane == 0u {
        scratch[place.subgroup] = partial;
    }
    workgroupBarrier();
    var largest = scratch[0];
    for (var k = 1u; k < place.subgroups; k++) {
        largest = max(largest, scratch[k]);
    }
    return largest;
}
