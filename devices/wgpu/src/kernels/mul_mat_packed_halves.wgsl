        // Packed rows are decoded 16 elements at a time. Half of them belong to a neighbour.
        let row = load16_a(row_a(weights_row), k & ~15u);
        let odd = (k & 8u) > 0u;
        {{#i 2}} w{{i}} = halves(select(row[{{i}}], row[2 + {{i}}], odd));
        {{/i}}
