
// Keys and values of any type, four elements at a time.
alias Sum = vec4<f32>;

var<workgroup> query: array<f32, {{query_size}}>;

fn key4(row: vec3<u32>, k: u32) -> vec4<f32> {
    return {{loaded_key}};
}

fn value4(row: vec3<u32>, k: u32) -> vec4<f32> {
    return {{loaded_value}};
}

fn keep_query(row: vec3<u32>, local: u32) {
    for (var i = local; i < {{query_size}}u; i += {{group_size}}u) {
        query[i] = 0.0;
        if i < shape_a().x {
            query[i] = get_a(vec4<u32>(i, row));
        }
    }
}

// Of the query and a key.
fn product(row: vec3<u32>) -> f32 {
    var product = 0.0;
    for (var k = 0u; k < shape_a().x; k += 4u) {
        product += dot(key4(row, k), vec4<f32>(query[k], query[k + 1u], query[k + 2u], query[k + 3u]));
    }
    return product;
}

// `sum` with the elements from `mine` on of this invocation's share of `count` weighted values from row `first` on.
fn with_values(before: Sum, first: vec3<u32>, mine: u32, share: u32, count: u32) -> Sum {
    var sum = before;
    for (var j = share; j < count; j += SUMS) {
        let w = weights[j];
        // What lies in unused cells of a cache does not matter.
        if w != 0.0 {
            sum += w * value4(vec3<u32>(first.x + j, first.yz), mine);
        }
    }
    return sum;
}
