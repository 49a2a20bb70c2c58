trl a \
  # b

trl a \
  b 'c
 d' "e\
f"
