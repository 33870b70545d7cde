
fn matrix_A(block: u32, local: u32, place: Place) {
    let shape = shape_A();
    let units = shape.x / 32u;
    let per_column = shape.x / 16u;
    // Places of the numbers, in vectors of four words, and of their scales, in words.
    let numbers = parameters.tensors[SCRATCH].start >> 4u;
    let scales = (parameters.tensors[SCRATCH].start >> 2u) + COLUMN_COUNTu * (shape.x / 4u);
    let first = block * ROW_COUNTu;
    EACH(r, ROW_COUNT) { let row#r = row_A(vec3<u32>(min(first + #ru, shape.y - 1u), 0u, 0u));
    }
    EACH(r, ROW_COUNT) { EACH(c, COLUMN_COUNT) { var sum#r_#c = 0.0;
    } }
    for (var u = local; u < units; u += GROUP_SIZEu) {
        let groups = groups_A(u, units);
        EACH(r, ROW_COUNT) { let unit#r = unit_A(row#r, u, units);
        }
        EACH(c, COLUMN_COUNT) {
            let at#c = #cu * per_column + groups;
            let x#c = wide_w(numbers + at#c.x);
            let z#c = wide_w(numbers + at#c.y);
            let m#c = scales_of(scales + 2u * at#c.x);
            let n#c = scales_of(scales + 2u * at#c.y);
            EACH(r, ROW_COUNT) { sum#r_#c += product(unit#r, x#c, z#c, m#c, n#c);
            }
        }
    }
    let slots = partial_slots(place);
    EACH(r, ROW_COUNT) { EACH(c, COLUMN_COUNT) {
        let partial#r_#c = partial_sum(sum#r_#c);
        if has_partial(place) {
            partials[(#ru * COLUMN_COUNTu + #cu) * slots + partial_slot(place)] = partial#r_#c;
        }
    } }
    workgroupBarrier();
    for (var i = local; i < ROW_COUNTu * COLUMN_COUNTu; i += GROUP_SIZEu) {
        let row = first + i / COLUMN_COUNTu;
        if row < shape.y {
            var sum = 0.0;
            for (var j = 0u; j < slots; j++) {
                sum += partials[i * slots + j];
            }
            put_Y(vec4<u32>(row, i % COLUMN_COUNTu, 0u, 0u), sum);
        }
    }
}
