printf -v A '%03d' 5
trl $A $(printf x)
