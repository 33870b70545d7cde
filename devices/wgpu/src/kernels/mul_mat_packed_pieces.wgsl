        // Packed rows are decoded 16 elements at a time.
        let row = load16_a(row_a(weights_row), k);
        {{#i 4}} w{{i}} = halves(row[{{i}}]);
        {{/i}}
