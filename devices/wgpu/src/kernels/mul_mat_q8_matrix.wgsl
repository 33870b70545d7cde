
fn matrix_{{weights}}(block: u32, local: u32, place: Place) {
    let shape = shape_{{weights}}();
    let units = shape.x / 32u;
    let per_column = shape.x / 16u;
    // Places of the numbers, in vectors of four words, and of their scales, in words.
    let numbers = parameters.tensors[{{scratch}}].start >> 4u;
    let scales = (parameters.tensors[{{scratch}}].start >> 2u) + {{column_count}}u * (shape.x / 4u);
    let first = block * {{row_count}}u;
    {{#r row_count}} let row{{r}} = row_{{weights}}(vec3<u32>(min(first + {{r}}u, shape.y - 1u), 0u, 0u));
    {{/r}}
    {{#r row_count}} {{#c column_count}} var sum{{r}}_{{c}} = 0.0;
    {{/c}} {{/r}}
    for (var u = local; u < units; u += {{group_size}}u) {
        let groups = groups_{{weights}}(u, units);
        {{#r row_count}} let unit{{r}} = unit_{{weights}}(row{{r}}, u, units);
        {{/r}}
        {{#c column_count}}
            let at{{c}} = {{c}}u * per_column + groups;
            let x{{c}} = wide_w(numbers + at{{c}}.x);
            let z{{c}} = wide_w(numbers + at{{c}}.y);
            let m{{c}} = scales_of(scales + 2u * at{{c}}.x);
            let n{{c}} = scales_of(scales + 2u * at{{c}}.y);
            {{#r row_count}} sum{{r}}_{{c}} += product(unit{{r}}, x{{c}}, z{{c}}, m{{c}}, n{{c}});
            {{/r}}
        {{/c}}
    }
    let slots = partial_slots(place);
    {{#r row_count}} {{#c column_count}}
        let partial{{r}}_{{c}} = partial_sum(sum{{r}}_{{c}});
        if has_partial(place) {
            partials[({{r}}u * {{column_count}}u + {{c}}u) * slots + partial_slot(place)] = partial{{r}}_{{c}};
        }
    {{/c}} {{/r}}
    workgroupBarrier();
    for (var i = local; i < {{row_count}}u * {{column_count}}u; i += {{group_size}}u) {
        let row = first + i / {{column_count}}u;
        if row < shape.y {
            var sum = 0.0;
            for (var j = 0u; j < slots; j++) {
                sum += partials[i * slots + j];
            }
            put_{{result}}(vec4<u32>(row, i % {{column_count}}u, 0u, 0u), sum);
        }
    }
}
