
// Keys and values in halves, eight elements at a time, with several loads that do not wait for each other.
alias Sum = mat2x4<f32>;

// In vectors of four elements.
const QUERY: u32 = {{query_size}}u / 4u;

var<workgroup> query: array<vec4<f32>, QUERY>;

fn query4(row: vec3<u32>, k: u32) -> vec4<f32> {
    return {{loaded_query}};
}

fn keep_query(row: vec3<u32>, local: u32) {
    for (var i = local; i < QUERY; i += {{group_size}}u) {
        query[i] = query4(row, i * 4u);
    }
}

// Of the query and a key.
fn product(key: vec3<u32>) -> f32 {
    let row = row_b(key);
    var product = 0.0;
    for (var k = 0u; k < {{query_size}}u; k += 8u * {{chunk}}u) {
        {{#j chunk}} let w{{j}} = load8_b(row, k + 8u * {{j}}u);
        {{/j}}
        {{#j chunk}} product += dot(w{{j}}[0], query[k / 4u + 2u * {{j}}u]) + dot(w{{j}}[1], query[k / 4u + 2u * {{j}}u + 1u]);
        {{/j}}
    }
    return product;
}

// `sum` with the elements from `mine` on of this invocation's share of `count` weighted values from row `first` on.
fn with_values(before: Sum, first: vec3<u32>, mine: u32, share: u32, count: u32) -> Sum {
    var sum = before;
    for (var j = share; j < count; j += 4u * SUMS) {
        {{#i 4}}
            let j{{i}} = j + {{i}}u * SUMS;
            let v{{i}} = load8_c(row_c(vec3<u32>(first.x + min(j{{i}}, count - 1u), first.yz)), mine);
            let w{{i}} = select(0.0, weights[min(j{{i}}, {{group_size}}u - 1u)], j{{i}} < count);
        {{/i}}
        // What lies in unused cells of a cache does not matter.
        {{#i 4}} if w{{i}} != 0.0 {
            sum += w{{i}} * v{{i}};
        } {{/i}}
    }
    return sum;
}
