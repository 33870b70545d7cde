// Keys are done as queries are, and written where numbers of rows say; so are values, an element or a block by each invocation.
    let keys = shape_k();
    let values = shape_v();
    if number < rows_of(queries) + rows_of(keys) {
        let row = row_indices(number - rows_of(queries), keys);
        let scale = scale_k(row, parameters.floats[2].y, local, place);
{{stored_keys}}
        return;
    }
    let element = (number - rows_of(queries) - rows_of(keys)) * {{group_size}}u + local;
    let shape = values / vec4<u32>({{values_each}}u, 1u, 1u, 1u);
    if element >= elements_of(shape) {
        return;
    }
    let i = indices(element, shape);
    let row = index_n(at_n(vec4<u32>(i.y, 0u, 0u, 0u)), shape_u().y);
    if row >= shape_u().y {
        fail();
        return;
    }
    {{stored_value}}
